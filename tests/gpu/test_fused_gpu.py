"""Fused BatchNorm on a GPU: exactness, CUDA graphs, and how long each layer of ResNet-50 takes.

pytest -s tests/gpu/test_fused_gpu.py -k "each_layer or stem or compiled_step"     prints the times
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import torchvision
from torch.nn import functional

from raydali.bench.train_step import optimizer_step
from raydali.training.cuda_graphs import WARM_UP_STEPS
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.fused import kernels, layers, operators
from raydali.training.models.normalized import Normalized
from raydali.training.worker import Worker
from tests.support.batch_norms import SETTINGS, count_layers, random_bits, random_images, results, tensors

pytestmark = pytest.mark.gpu

BATCH = 256
RELU = [(64, 112, 1), (64, 56, 6), (128, 56, 1), (128, 28, 7), (256, 28, 1), (256, 14, 11), (512, 14, 1), (512, 7, 5)]
"""Layers of ResNet-50 with BatchNorm and ReLU: channels, side of the images, number of layers."""
ADDITION = [(256, 56, 3), (512, 28, 4), (1024, 14, 6), (2048, 7, 3)]
"""Those with an addition between them; each shape is also once that of BatchNorm alone."""
LAYERS = [
    *((*layer, "relu") for layer in RELU),
    *((*layer, "addition") for layer in ADDITION),
    *((channels, side, 1, "alone") for channels, side, _ in ADDITION),
]
MOVED = {"relu": (3, 5), "addition": (4 + 1 / 16, 7 + 1 / 16), "alone": (3, 5)}
"""Tensors that forward and backward move, see kernels.py."""


def filled(shape: Sequence[int]) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)


class Layer:
    """A layer with inputs of its own; `forward` and `backward` run its kernels."""

    def __init__(self, channels: int, side: int, kind: str, *, batch: int = BATCH) -> None:
        shape = batch, channels, side, side
        self.y, self.grad = filled(shape), filled(shape)
        self.residual, self.other = (filled(shape) if kind == "addition" else None for _ in range(2))
        self.weight, self.bias = torch.rand(channels, device="cuda") + 0.5, torch.randn(channels, device="cuda")
        self.running = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        self.relu = kind != "alone"
        self.forward()

    def forward(self) -> None:
        statistics = operators.statistics(self.y, *self.running, *SETTINGS)
        self.saved = *statistics, self.weight, self.bias
        self.output, self.signs = operators.normalize(self.y, self.residual, *self.saved, self.relu)

    def backward(self) -> tuple[torch.Tensor, ...]:
        gradients: tuple[torch.Tensor, ...] = operators.gradients(
            self.grad, self.other, self.y, self.signs, *self.saved, self.relu
        )
        return gradients


def milliseconds(function: Callable[[], object]) -> float:
    """Return the time of its kernels; a CUDA graph launches them, as in training, so that none waits for the host."""
    from triton.testing import do_bench_cudagraph

    return float(do_bench_cudagraph(function, return_mode="median"))


def bandwidth() -> float:
    """GB/s of a copy."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / 1e6 / milliseconds(lambda: target.copy_(source))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["relu", "addition", "pooling"])
@pytest.mark.parametrize(("channels", "side"), [(3, 33), (64, 112), (200, 9), (2048, 7)])
def test_it_is_as_exact_as_float64(dtype: torch.dtype, kind: str, channels: int, side: int) -> None:
    if kind == "addition" and channels % kernels.SIGNS:
        pytest.skip("PyTorch's functions are taken")
    y, pool = random_images((16, channels, side, side), dtype, 0), kind == "pooling"
    grad = random_images((16, channels, *2 * [(side + 1) // 2 if pool else side]), dtype, 3)
    inputs = {name: each.cuda() for name, each in tensors(y, residual=kind == "addition").items()}
    found, exact = (results(inputs, grad.cuda(), as_dtype, pool=pool) for as_dtype in (None, torch.float64))
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        rounding = torch.finfo(found[name].dtype).eps / 2
        allowed = rounding * expected.abs() + 3e-5 * expected.abs().max().clamp(min=1)
        # Few values, whose sum is nearly 0, are on the other side of ReLU.
        assert ((found[name].double() - expected).abs() > allowed).double().mean() < 1e-5, name


def test_backward_adds_two_gradients() -> None:
    layer = Layer(256, 14, "addition", batch=16)
    apart, grad = layer.backward(), layer.grad
    assert layer.other is not None
    layer.grad, layer.other = (grad.float() + layer.other.float()).bfloat16(), None
    for one, other in zip(apart, layer.backward(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * float(other.abs().max()))


def test_each_layer_of_resnet50() -> None:
    copied, total, moved = bandwidth(), 0.0, 0.0
    print(f"\ncopy: {copied:.0f} GB/s\nlayer            number  forward ms  GB/s  backward ms  GB/s")
    for channels, side, number, kind in LAYERS:
        layer = Layer(channels, side, kind)
        parts = []
        for function, units in zip((layer.forward, layer.backward), MOVED[kind], strict=True):
            gigabytes, taken = units * layer.y.numel() * 2 / 1e9, milliseconds(function)
            total, moved = total + number * taken, moved + number * gigabytes
            parts.append(f"{taken:10.3f} {1e3 * gigabytes / taken:5.0f}")
        print(f"{kind:8} {channels:4}x{side:<3} {number:6}  {'  '.join(parts)}")
    print(f"all {sum(layer[2] for layer in LAYERS)}: {total:.2f} ms, {moved:.1f} GB, {1e3 * moved / total:.0f} GB/s")
    assert 1e3 * moved / total > copied / 2


def test_max_pooling_of_the_stem() -> None:
    layer, windows = Layer(64, 112, "relu"), (BATCH, 64, 56, 56)
    grad, other = filled(windows), filled(windows)
    kept = operators.normalize_and_pool(layer.y, *layer.saved)[1:]
    settings = [3, 3], [2, 2], [1, 1], [1, 1], False
    indices = torch.ops.aten.max_pool2d_with_indices(layer.output, *settings)[1]
    parts: dict[str, tuple[Callable[[], object], float]] = {
        "normalize": (partial(operators.normalize, layer.y, None, *layer.saved, True), 2),
        "max_pool2d of PyTorch": (partial(torch.ops.aten.max_pool2d_with_indices, layer.output, *settings), 2.25),
        "both, fused": (partial(operators.normalize_and_pool, layer.y, *layer.saved), 1.625),
        "gradients": (layer.backward, 5),
        "gradient of max_pool2d": (
            partial(torch.ops.aten.max_pool2d_with_indices_backward, grad, layer.output, *settings, indices),
            3.25,
        ),
        "gradients, fused": (partial(operators.gradients_of_pool, grad, None, layer.y, *kept, *layer.saved), 2.875),
        "of two gradients": (partial(operators.gradients_of_pool, grad, other, layer.y, *kept, *layer.saved), 3.375),
    }
    times = {}
    for name, (function, moved) in parts.items():
        times[name] = milliseconds(function)
        rate = moved * layer.y.numel() * 2 / 1e6 / times[name]
        print(f"\n{name:22} {times[name]:7.3f} ms {rate:5.0f} GB/s", end="")
    assert times["both, fused"] < times["normalize"] + times["max_pool2d of PyTorch"]
    assert times["gradients, fused"] < times["gradients"] + times["gradient of max_pool2d"]


@pytest.mark.parametrize("shape", [(2, 3, 18, 16), (1, 3, 17, 19)])
def test_the_convolution_of_the_stem_is_exact(shape: tuple[int, ...]) -> None:
    images, weight = random_bits(shape, 0).cuda(), random_bits((64, 3, 7, 7), 1).cuda().requires_grad_()
    output = layers.stem_convolution(images, weight, None)
    grad = random_bits(output.shape, 2).cuda()
    exact = functional.conv2d(images.double(), weight.double(), None, *layers.STEM_SETTINGS)
    assert torch.equal(output.double(), exact)
    found, expected = (torch.autograd.grad(each, weight, grad.to(each.dtype))[0] for each in (output, exact))
    assert torch.equal(found, expected)


def test_the_convolution_of_the_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    images, weight, grad = filled((BATCH, 3, 224, 224)), filled((64, 3, 7, 7)), filled((BATCH, 64, 112, 112))
    forms = {
        "as it is": (images, weight, [2, 2], [3, 3]),
        "of squares": (layers._squares(images, 4, 2, 2), layers._squares(weight, 1, 0, 0), [1, 1], [0, 0]),
    }
    times = []
    for name, (x, w, stride, padding) in forms.items():
        settings = stride, padding, [1, 1], False, [0, 0], 1
        convolve = partial(torch.ops.aten.convolution, x, w, None, *settings)
        gradient = partial(
            torch.ops.aten.convolution_backward, grad, x, w, None, *settings, output_mask=[False, True, False]
        )
        times.append([milliseconds(convolve), milliseconds(gradient)])
        print(f"\n{name:10}: {times[-1][0]:.3f} ms, gradient of the weight {times[-1][1]:.3f} ms", end="")
    assert sum(times[1]) < sum(times[0])


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of channels of the layers that kernels normalised."""
    seen = count_layers(monkeypatch)
    torch._dynamo.reset()
    yield seen
    torch._dynamo.reset()


def network(name: str) -> tuple[torch.nn.Module, torch.nn.Module, Worker]:
    """Return a model with the same weights each time, the same for 8-bit images, and a worker with its own stream."""
    torch.manual_seed(0)
    worker = Worker.join(torch.device("cuda", 0), cpus=8, node="")
    model = torchvision.models.get_model(name).to(worker.device).to(memory_format=torch.channels_last)
    return model, Normalized(model).to(worker.device), worker


def batch_of(size: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    images = torch.randint(0, 256, (size, 3, side, side), generator=generator, device="cuda", dtype=torch.uint8)
    return images.contiguous(memory_format=torch.channels_last), torch.arange(size, device="cuda") % 1000


def test_a_captured_step_computes_what_a_plain_one_does(seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    states = []
    for fused in (False, True):
        model, normalized, worker = network("resnet18")
        images, labels = batch_of(32, 64)
        step = ForwardBackward(
            model,
            lambda images, labels, network=normalized: functional.cross_entropy(network(images), labels),
            worker,
            Precision("fp32", worker.device),
            micro_batches=1,
            compiled=True,
            fused=fused,
            graph=True,
        )
        for _ in range(WARM_UP_STEPS + 5):  # the last ones replay the graph
            model.zero_grad()
            step(images, labels)
        gradients = {f"gradient of {name}": each.grad for name, each in model.named_parameters()}
        computed = gradients | dict(model.named_buffers())
        states.append({name: each.double() for name, each in computed.items() if each is not None})
    assert len(seen) == 20 * (WARM_UP_STEPS + 1)  # of the eager steps and the captured one
    for name, plain in states[0].items():
        error = (states[1][name] - plain).norm() / plain.norm()
        assert error < 1e-3, (name, error)


STEPS: dict[str, tuple[str, list[str] | None]] = {
    "plain": ("resnet50", None),
    "fused": ("resnet50", []),
    "without_pooling": ("resnet50", ["passes.fuse_pooling"]),
    "without_stem": ("resnet50", ["passes.replace_stem"]),
    "with_copies": ("vit_b_16", ["passes.replace_attention"]),
    "without_copies": ("vit_b_16", []),
}
"""Steps: the model, and the passes that are left out; None: all of them."""


@pytest.fixture(scope="module")
def rates() -> dict[str, float]:
    """Images/s of the steps that have been measured."""
    return {}


@pytest.mark.parametrize("name", STEPS)
def test_a_compiled_step(name: str, rates: dict[str, float], seen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._functorch.config
    import torch._inductor.config

    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    of, left_out = STEPS[name]
    for each in left_out or []:
        monkeypatch.setattr(f"raydali.training.fused.{each}", lambda _: 0)
    model, normalized, worker = network(of)
    images, labels = batch_of(BATCH, 224)
    is_fused = left_out is not None
    step, _ = optimizer_step(
        model, normalized, worker, Precision("bf16", worker.device), compiled=True, fused=is_fused, graph=True
    )
    # Caches do not know what is left out.
    uncached = torch._functorch.config.patch(enable_autograd_cache=False)
    with uncached, torch._inductor.config.patch(fx_graph_cache=False):
        for _ in range(WARM_UP_STEPS + 10):
            step(images, labels)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(50):
        step(images, labels)
    end.record()
    end.synchronize()
    rates[name] = 50 * BATCH / start.elapsed_time(end) * 1e3
    print(f"\n{name}: {rates[name]:.0f} images/s")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step(images, labels)
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=80))
    assert len(seen) == (53 * (WARM_UP_STEPS + 1) if is_fused and of == "resnet50" else 0)
    assert rates[name] > 0.9 * rates.get("plain" if of == "resnet50" else "with_copies", 0)
