"""Casts and counters of a compiled step in operators of lists."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.fx import GraphModule

from raydali.train.fused import grouping


def step(model: nn.Module, x: torch.Tensor, *, grouped: bool) -> tuple[list[int], list[str], dict[str, torch.Tensor]]:
    """Return the groups and the code of forward and backward, and the gradients and the state."""
    from torch._inductor.decomposition import select_decomp_table

    found: list[int] = []
    code: list[str] = []

    def compiler(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        if grouped:
            found.append(grouping.group(module.graph))
            module.graph.lint()
            module.recompile()
        code.append(str(module.graph))
        boxed: Callable[..., Any] = make_boxed_func(module.forward)
        return boxed

    torch._dynamo.reset()
    backend = aot_autograd(
        fw_compiler=compiler, decompositions=select_decomp_table(), keep_inference_input_mutations=True
    )
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = compiled(x)
    output.float().square().sum().backward()
    gradients = {f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}
    return found, code, gradients | model.state_dict()


def test_a_step_computes_the_same_with_fewer_operators() -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(5, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    single = copy.deepcopy(model)
    found, (forward, backward), results = step(model, x, grouped=True)
    _, code, expected = step(single, x, grouped=False)
    assert found == [2, 1]
    assert [forward.count(f"raydali.{name}") for name in ("cast", "add_one")] == [1, 1]
    assert backward.count("raydali.cast") == 1
    assert forward.count("aten.copy_.default]") == code[0].count("aten.copy_.default]") - 2
    assert results.keys() == expected.keys()
    assert all(torch.equal(results[name], expected[name]) for name in expected)
    assert int(results["1.num_batches_tracked"]) == int(results["4.num_batches_tracked"]) == 1
    strides = [each.grad.stride() for each in model.parameters() if each.grad is not None]
    assert strides == [each.grad.stride() for each in single.parameters() if each.grad is not None]


def test_operators_keep_their_contracts() -> None:
    tensors = [torch.randn(2, 3, 3, 3).contiguous(memory_format=torch.channels_last), torch.randn(4)]
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(grouping.cast, (tensors, torch.bfloat16), test_utils=tests)
    torch.library.opcheck(grouping.add_one, ([torch.tensor(1), torch.tensor(2)],), test_utils=tests)
