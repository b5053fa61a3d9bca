"""Layers of BatchNorm that are found in models, and what the models compute with fused ones."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.fx import Graph, GraphModule
from torch.nn import functional
from torchvision.models.resnet import BasicBlock, Bottleneck

from raydali.training.batchnorm import with_sync_batchnorm
from raydali.training.finetuning import freeze
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.fused import layers, operators, passes
from raydali.training.models.factories import set_drop_path
from raydali.training.models.normalized import Normalized
from raydali.training.models.small_images import digits_network
from raydali.training.worker import Worker
from tests.support.batch_norms import count_layers
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not operators.INTERPRETED, reason="Triton computes on the GPU: see test_fused_gpu.py")


@pytest.fixture(autouse=True)
def _from_the_start() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield


def images(*shape: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return made.contiguous(memory_format=torch.channels_last)


def found_in(model: nn.Module, *shape: int) -> tuple[int, str]:
    """Return how many layers are replaced, and the code that is left."""
    results: list[tuple[int, str]] = []

    def backend(module: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        forward = copy.deepcopy(module).forward
        results.append((passes.fuse(module.graph), str(module.graph)))
        module.graph.lint()
        return forward

    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(images(*shape))
    ((count, code),) = results
    return count, code


def fused(model: nn.Module) -> Callable[..., torch.Tensor]:
    """Return the model with fused layers, as one graph, without Inductor."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(module: GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        assert passes.fuse(module.graph)
        module.recompile()
        forward: Callable[..., Any] = aot_eager(module, inputs)
        return forward

    compiled: Callable[..., torch.Tensor] = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    return compiled


@pytest.mark.parametrize(
    ("build", "count"),
    [
        (lambda: timm.create_model("resnetv2_18"), 17),  # BatchNorm before convolutions
        # A stem of three convolutions, and three blocks that downsample.
        pytest.param(lambda: timm.create_model("resnet18d"), 22, marks=pytest.mark.slow),
        pytest.param(torchvision.models.resnet50, 53, marks=pytest.mark.slow),
        pytest.param(torchvision.models.convnext_tiny, 0, marks=pytest.mark.slow),
        pytest.param(torchvision.models.mobilenet_v2, 0, marks=pytest.mark.slow),  # ReLU6
    ],
)
def test_models(build: Callable[[], nn.Module], count: int) -> None:
    found, code = found_in(build(), 2, 3, 64, 64)
    assert found == code.count("raydali.batch_norm") == count


def test_a_bottleneck_that_downsamples_has_four() -> None:
    downsample = nn.Sequential(nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16))
    count, code = found_in(Bottleneck(8, 4, downsample=downsample), 2, 8, 4, 4)
    assert count == 4
    assert "iadd" not in code and "relu" not in code.replace("relu = None", "")


class _Sum(nn.Module):
    def __init__(self, add: Callable[..., torch.Tensor], **options: Any) -> None:
        super().__init__()
        self.norm, self.conv, self._add = nn.BatchNorm2d(8, **options), nn.Conv2d(8, 8, 1), add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self._add(self.norm, self.conv(x), x))


@pytest.mark.parametrize(
    ("add", "options", "count"),
    [
        (lambda norm, y, x: norm(y) + x, {}, 1),
        (lambda norm, y, x: x + norm(y), {}, 1),
        (lambda norm, y, x: torch.add(norm(y), x), {}, 1),
        (lambda norm, y, x: torch.add(norm(y), x, alpha=2), {}, 0),
        (lambda norm, y, x: y.mul(2).add_(norm(y)), {}, 0),  # in place
        (lambda norm, y, x: norm(y) + y, {}, 0),  # y could be changed before it is added
        (lambda norm, y, x: norm(y) + 1, {}, 0),
        (lambda norm, y, x: (z := norm(y)) + z.exp(), {}, 0),  # another user
        (lambda norm, y, x: norm(y), {}, 1),
        (lambda norm, y, x: norm.eval()(y), {}, 0),
        (lambda norm, y, x: norm(y), {"track_running_stats": False}, 1),
        (lambda norm, y, x: norm(y), {"affine": False}, 1),
    ],
)
def test_patterns(add: Callable[..., torch.Tensor], options: dict[str, Any], count: int) -> None:
    assert found_in(_Sum(add, **options), 2, 8, 4, 4)[0] == count


class _Stem(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), *layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


@pytest.mark.parametrize(
    ("layers", "count"),
    [
        ([nn.MaxPool2d(3, 2, 1)], 1),
        ([nn.MaxPool2d((3, 3), (2, 2), (1, 1))], 1),
        ([nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(3, 2, 1)], 1),
        ([nn.MaxPool2d(3, 2, 1, ceil_mode=True)], 0),
        ([nn.MaxPool2d(2, 2)], 0),
        ([nn.MaxPool2d(3, 2)], 0),
        ([nn.Identity(), nn.AvgPool2d(3, 2, 1)], 0),
    ],
)
def test_max_pooling(layers: list[nn.Module], count: int) -> None:
    found, code = found_in(_Stem(*layers), 2, 8, 9, 9)
    assert found == 1
    assert code.count(", True, True, )") == count
    assert code.count("pool2d") == len(layers) - count - isinstance(layers[0], nn.Identity)


def sync_layers_of_rank() -> tuple[int, str]:
    plain = nn.Sequential(BasicBlock(8, 8), _Stem(nn.MaxPool2d(3, 2, 1)))
    model = with_sync_batchnorm(plain, dist.group.WORLD, fused=True)
    return found_in(model.to(memory_format=torch.channels_last), 2, 8, 9, 9)


@pytest.mark.slow
def test_layers_that_are_synchronised() -> None:
    ((found, code),) = run_ranks(1, sync_layers_of_rank)
    assert found == 3
    assert code.count("raydali.batch_norm") == 3 and not code.count("pool2d")


@pytest.mark.parametrize(
    ("settings", "count"), [((7, 2, 3), 1), ((7, 2, (3, 3)), 1), ((7, 1, 3), 0), ((7, 2, 3, 2), 0)]
)
def test_convolutions_of_a_stem(settings: tuple[Any, ...], count: int) -> None:
    found, code = found_in(nn.Sequential(nn.Conv2d(3, 8, *settings), nn.BatchNorm2d(8), nn.ReLU()), 2, 3, 16, 16)
    assert found == 1
    assert code.count("raydali.stem_convolution") == count == 1 - code.count("torch.conv2d")


def test_the_stem_of_a_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, ...]] = set()
    whole = layers._squares

    def counted(images: torch.Tensor, *sides: int) -> torch.Tensor:
        seen.add(tuple(images.shape))
        return whole(images, *sides)

    monkeypatch.setattr(layers, "_squares", counted)
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
    model = nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    x = torch.randint(0, 256, (2, 3, 33, 32), dtype=torch.uint8)
    compiled, double = fused(Normalized(model)), Normalized(copy.deepcopy(model)).double()
    with torch.autocast("cpu", torch.bfloat16):
        output = compiled(x)
    output.float().square().sum().backward()
    exact = double(x)
    exact.square().sum().backward()
    found, expected = ({name: each.grad for name, each in of.named_parameters()} for of in (model, double.model))
    for name, weight in {"output": output, **found}.items():
        right = {"output": exact, **expected}[name]
        assert weight is not None and right is not None
        assert (weight.double() - right).norm() < 0.05 * right.norm(), name
    assert seen == {(2, 3, 33, 32), (8, 3, 7, 7)}


def test_frozen_layers_and_branches_with_drop_path_are_left() -> None:
    frozen = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
    freeze(frozen, r"0\.")
    assert found_in(frozen, 2, 8, 4, 4)[0] == 2
    dropping = nn.Sequential(BasicBlock(8, 8), BasicBlock(8, 8))
    set_drop_path(dropping, 0.5)
    torch._dynamo.reset()
    assert found_in(dropping, 2, 8, 4, 4)[0] == 3  # the first branch is never dropped


def trained(model: nn.Module, forward: Callable[..., torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the output, all gradients and the state after a step."""
    x = x.clone().requires_grad_()
    output = forward(x)
    output.square().mean().backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert x.grad is not None
    return {"output": output.detach(), "input": x.grad} | gradients | dict(model.named_buffers())


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest error of each tensor, relative to its largest value or to 0.01."""
    assert found.keys() == exact.keys()
    scales = {name: float(each.abs().max().clamp(min=1e-2)) for name, each in exact.items()}
    return {name: float((found[name] - each).abs().max()) / scales[name] for name, each in exact.items()}


def blocks() -> nn.Module:
    torch.manual_seed(0)
    downsample = nn.Sequential(nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16))
    stem = nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    rest = Bottleneck(8, 4, downsample=downsample), Bottleneck(16, 4), BasicBlock(16, 16)
    model = nn.Sequential(*stem, *rest)
    return model.to(memory_format=torch.channels_last)


def test_blocks_train_as_in_float64() -> None:
    model, x = blocks(), images(4, 8, 13, 13)
    exact = trained(double := copy.deepcopy(model).double(), double, x.double())
    assert max(errors(trained(model, fused(model), x), exact).values()) < 1e-5


@pytest.mark.slow
def test_resnet18_trains_as_in_float64() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18(num_classes=10).to(memory_format=torch.channels_last)
    x = images(8, 3, 64, 64)
    exact = trained(double := copy.deepcopy(model).double(), double, x.double())
    plain = errors(trained(single := copy.deepcopy(model), single, x), exact)
    for name, error in errors(trained(model, fused(model), x), exact).items():
        assert error < 3 * plain[name] + 1e-5, name


def test_inductor_knows_all_operators() -> None:
    from torch._inductor.lowering import lowerings

    passes.inductor_options()
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("raydali::")}
    composed = {"raydali::batch_norm", "raydali::stem_convolution"}
    assert composed < names
    for name in names - composed:
        assert getattr(torch.ops.raydali, name.removeprefix("raydali::")).default in lowerings


@pytest.mark.slow
def test_inductor_fuses_additions_of_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.utils import fresh_cache

    added: list[int] = []
    whole = passes.fuse_additions

    def counted(graph: Graph) -> int:
        added.append(whole(graph))
        return added[-1]

    monkeypatch.setattr(passes, "fuse_additions", counted)
    model, x = blocks(), images(4, 8, 13, 13)
    exact = trained(double := copy.deepcopy(model).double(), double, x.double())
    compiled = torch.compile(model, fullgraph=True, options=passes.inductor_options())
    with fresh_cache(), torch._inductor.config.patch(implicit_fallbacks=False):
        assert max(errors(trained(model, compiled, x), exact).values()) < 1e-5
    assert sum(added) == 3  # the outputs of the stem and of the first two blocks


@pytest.mark.slow
def test_a_compiled_step_learns_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_layers(monkeypatch)
    x, labels = images(16, 3, 32, 32), torch.arange(16) % 10
    losses: list[list[float]] = []
    for is_fused in (False, True):
        torch.manual_seed(0)
        model = digits_network(10).to(memory_format=torch.channels_last)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = ForwardBackward(
            model,
            lambda x, labels, model=model: functional.cross_entropy(model(x), labels),
            Worker.join(CPU, cpus=1, node=""),
            Precision("fp32", CPU),
            micro_batches=1,
            compiled=True,
            fused=is_fused,
        )
        losses.append([])
        for _ in range(5):
            losses[-1].append(step(x, labels).item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert losses[1][-1] < losses[1][0] / 2
    assert len(seen) == 5 * sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
