"""Self-attention that is replaced in models, and what they compute with it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule
from torchvision.models.vision_transformer import EncoderBlock

from raydali.training.fused import passes
from tests.support.quick import first_quick

Forward = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def _from_the_start() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield


def replaced_in(function: Forward) -> tuple[Forward, list[int]]:
    """Return the compiled function, without Inductor, and how often its first call replaces attention."""
    from torch._dynamo.backends.debugging import aot_eager

    counts: list[int] = []

    def backend(module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        counts.append(passes.replace_attention(module.graph))
        module.graph.lint()
        module.recompile()
        forward: Callable[..., Any] = aot_eager(module, inputs)
        return forward

    return torch.compile(function, backend=backend, fullgraph=True, dynamic=False), counts


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Attention of x, or of other queries, keys and values."""

    def __init__(self, call: Callable[[nn.MultiheadAttention, torch.Tensor], torch.Tensor], **options: Any) -> None:
        super().__init__()
        self.attention, self._call = nn.MultiheadAttention(16, 4, dtype=torch.float64, **options), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._call(self.attention, x)


def plain(attention: nn.MultiheadAttention, x: torch.Tensor, **options: Any) -> torch.Tensor:
    result: torch.Tensor = attention(x, x, x, need_weights=False, **options)[0]
    return result


@first_quick(
    "model",
    [
        EncoderBlock(4, 16, 32, 0.0, 0.0).double(),
        Attention(plain),  # the sequence is before the batch
        Attention(plain, batch_first=True, bias=False),
    ],
)
def test_it_computes_the_same(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    ours, x = copy.deepcopy(model), random(3, 5, 16)
    function, counts = replaced_in(ours)
    found, expected = function(x), model(x)
    torch.testing.assert_close(found, expected)
    for each in (found, expected):
        each.square().sum().backward()
    for one, other in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert counts == [1]


def test_it_drops_out_in_training() -> None:
    model, x = Attention(plain, dropout=0.5), random(3, 5, 16)
    function, counts = replaced_in(model)
    found, expected = function(x), model.eval()(x)
    assert counts == [1] and not torch.allclose(found, expected)
    torch.testing.assert_close(replaced_in(model.eval())[0](x), expected)


@first_quick(
    ("call", "options"),
    [
        (lambda attention, x: attention(x, x, x)[1], {}),  # its weights
        (lambda attention, x: attention(x, x + 1, x + 1, need_weights=False)[0], {}),
        (lambda attention, x: plain(attention, x, attn_mask=torch.zeros(3, 3, dtype=torch.bool)), {}),
        (lambda attention, x: plain(attention, x, key_padding_mask=torch.zeros(5, 3, dtype=torch.bool)), {}),
        (lambda attention, x: plain(attention, x[0]), {}),  # no batch
        (plain, {"add_bias_kv": True}),
        (plain, {"add_zero_attn": True}),
    ],
)
def test_others_are_left(call: Callable[..., torch.Tensor], options: dict[str, Any]) -> None:
    model, x = Attention(call, **options), random(3, 5, 16)
    function, counts = replaced_in(model)
    torch.testing.assert_close(function(x), model(x))
    assert counts == [0]
