"""Fused operators by Triton's interpreter against PyTorch's in float64."""

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from raydali.training.fused import layers, operators
from tests.support.batch_norms import SETTINGS, Tensors, random_bits, random_images, results, tensors
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(not operators.INTERPRETED, reason="Triton computes on the GPU: see test_fused_gpu.py")

slow = partial(pytest.param, marks=pytest.mark.slow)
SMALL = 3, 24, 6, 7
RELATIVE = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-7}
"""Errors of rounding. Triton's interpreter rounds bf16 towards zero; a GPU rounds it to the nearest value."""


@pytest.fixture(autouse=True)
def _many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small images need several tiles of several programs."""
    monkeypatch.setattr(operators, "TILE", 1024)
    monkeypatch.setattr(operators, "REDUCING", 40)
    monkeypatch.setattr(operators, "SWEEPING", 20)


def windows(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random images with a pixel for each window of max-pooling."""
    return random_images((*shape[:2], *((side + 1) // 2 for side in shape[2:])), dtype, seed)


def weights_of(inputs: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs["weight"], inputs["bias"]


def assert_close(found: Tensors, exact: Tensors, dtype: torch.dtype) -> None:
    """Images differ by their rounding, and all by 1e-5 of the largest value or of 1, for sums of fp32."""
    assert found.keys() == exact.keys()
    for name, expected in exact.items():
        assert found[name].dtype == (dtype if expected.dim() == 4 else torch.float32)
        allowed = RELATIVE[found[name].dtype] * expected.abs() + 1e-5 * expected.abs().max().clamp(min=1)
        assert ((found[name].double() - expected).abs() <= allowed).all(), name


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 1, 1, 1), torch.float32),
        ((3, 3, 5, 7), torch.float32),
        ((2, 17, 4, 4), torch.float32),
        slow((5, 8, 25, 40), torch.float32),
        slow((2, 2048, 1, 2), torch.float32),
        (SMALL, torch.bfloat16),
    ],
)
def test_batch_norm_and_relu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, grad = tensors(random_images(shape, dtype, 0), residual=False), random_images(shape, dtype, 3)
    assert_close(results(inputs, grad), results(inputs, grad, torch.float64), dtype)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(SMALL, torch.float32), (SMALL, torch.float16), (SMALL, torch.bfloat16), slow((4, 64, 9, 7), torch.bfloat16)],
)
def test_an_addition_before_relu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, grad = tensors(random_images(shape, dtype, 0), residual=True), random_images(shape, dtype, 3)
    assert_close(results(inputs, grad), results(inputs, grad, torch.float64), dtype)


def test_batch_norm_alone() -> None:
    inputs, grad = (
        tensors(random_images(SMALL, torch.float16, 0), residual=False),
        random_images(SMALL, torch.float16, 3),
    )
    exact = results(inputs, grad, torch.float64, relu=False)
    assert_close(results(inputs, grad, relu=False), exact, torch.float16)


def of_rank(inputs: Tensors, grad: torch.Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """Return the results of a rank's part of the images, with statistics over all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = {name: tensor.chunk(ranks)[rank] if tensor.dim() == 4 else tensor for name, tensor in inputs.items()}
    assert dist.group.WORLD is not None
    found = results(own, grad.chunk(ranks)[rank], group=dist.group.WORLD.group_name, **options)
    return {name: tensor.numpy() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("ranks", "options", "residual"),
    [
        (2, {"relu": True}, True),
        slow(2, {"relu": True}, False),
        slow(2, {"relu": True, "pool": True}, False),
        (3, {"relu": False}, False),
    ],
)
def test_statistics_over_ranks(ranks: int, options: dict[str, Any], residual: bool) -> None:
    shape = 6, 24, 6, 7
    inputs = tensors(3 + random_images(shape, torch.float32, 0), residual=residual)
    grad = windows(shape, torch.float32, 3) if "pool" in options else random_images(shape, torch.float32, 3)
    exact = results(inputs, grad, torch.float64, **options)
    parts = run_ranks(ranks, of_rank, inputs, grad, options)
    for name, expected in exact.items():
        of_ranks = [torch.from_numpy(part[name]) for part in parts]
        if expected.dim() == 4:
            found = torch.cat(of_ranks)
        elif name.startswith("gradient"):  # that of a rank's part, which the all-reduce of gradients adds up
            found = torch.stack(of_ranks).sum(0)
        else:
            assert all(torch.equal(of_ranks[0], other) for other in of_ranks)
            found = of_ranks[0]
        assert_close({name: found}, {name: expected}, torch.float32)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 1, 1, 2), torch.float32),
        ((2, 17, 5, 8), torch.float32),  # sides odd and even
        slow((2, 24, 13, 11), torch.float32),
        slow((2, 24, 13, 11), torch.float16),
        ((2, 24, 13, 11), torch.bfloat16),
    ],
)
def test_max_pooling_after_relu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs, grad = tensors(random_images(shape, dtype, 0), residual=False), windows(shape, dtype, 3)
    assert_close(results(inputs, grad, pool=True), results(inputs, grad, torch.float64, pool=True), dtype)


def test_of_equal_pixels_the_first_gets_the_gradient() -> None:
    y = random_images((2, 8, 9, 10), torch.float32, 0).round()
    inputs, grad = tensors(y, residual=False), windows(y.shape, torch.float32, 3)
    exact = results(inputs, grad, torch.float64, pool=True)
    assert len(y.unique()) < 10
    assert_close(results(inputs, grad, pool=True), exact, torch.float32)


@pytest.mark.parametrize("residual", [True, False])
def test_backward_adds_two_gradients(residual: bool) -> None:
    y, grads = random_images(SMALL, torch.float32, 0), [random_images(SMALL, torch.float32, seed) for seed in (3, 4)]
    inputs = tensors(y, residual=residual)
    exact = results(inputs, grads[0].double() + grads[1].double(), torch.float64)
    mean, rstd = operators.statistics(y, inputs["running_mean"], inputs["running_var"], *SETTINGS)
    weights = weights_of(inputs)
    _, signs = operators.normalize(y, inputs.get("residual"), mean, rstd, *weights, True)
    of_y, of_residual, *of_weights = operators.gradients(*grads, y, signs, mean, rstd, *weights, True)
    found = dict(zip(("y", "weight", "bias", "residual"), (of_y, *of_weights, of_residual), strict=True))
    named = {name: found[name.removeprefix("gradient of ")] for name in exact if name.startswith("gradient")}
    assert_close(named, {name: exact[name] for name in named}, torch.float32)


def test_backward_adds_two_gradients_of_windows() -> None:
    inputs = tensors(y := random_images(SMALL, torch.float32, 0), residual=False)
    grads = [windows(SMALL, torch.float32, seed) for seed in (3, 4)]
    exact = results(inputs, grads[0].double() + grads[1].double(), torch.float64, pool=True)
    channels = *operators.statistics(y, inputs["running_mean"], inputs["running_var"], *SETTINGS), *weights_of(inputs)
    kept = operators.normalize_and_pool(y, *channels)[1:]
    found = dict(zip(("y", "weight", "bias"), operators.gradients_of_pool(*grads, y, *kept, *channels), strict=True))
    assert_close(found, {name: exact[f"gradient of {name}"] for name in found}, torch.float32)


def test_a_large_mean_costs_no_precision() -> None:
    noise = torch.randn((2, 5, 30, 20), generator=torch.Generator().manual_seed(0))
    y = (1e3 + 1e-2 * noise).contiguous(memory_format=torch.channels_last)
    y[0, 1, 0, 0] = 0  # an unlucky shift
    exact, running = y.double().var((0, 2, 3), correction=0), (torch.zeros(5), torch.ones(5))
    mean, rstd = operators.statistics(y, *running, *SETTINGS)
    torch.testing.assert_close(rstd.double() ** -2 - SETTINGS[1], exact, rtol=1e-4, atol=0)
    torch.testing.assert_close(mean.double(), y.double().mean((0, 2, 3)), rtol=2**-23, atol=0)


def test_a_channel_of_one_value_gives_the_bias() -> None:
    y = torch.full((3, 8, 4, 4), 0.7).contiguous(memory_format=torch.channels_last)
    found = results(tensors(y, residual=False), random_images((3, 8, 4, 4), torch.float32, 3), relu=False)
    inputs = tensors(y, residual=False)
    assert (found["output"] == inputs["bias"][:, None, None]).all()
    assert found["gradient of weight"].eq(0).all() and found["gradient of y"].isfinite().all()


def test_nan_stays() -> None:
    y = random_images(SMALL, torch.float32, 0)
    y[1, 5, 0, 0] = torch.nan
    found = results(tensors(y, residual=True), random_images(SMALL, torch.float32, 3))
    assert found["output"][:, 5].isnan().all() and not found["output"][:, :5].isnan().any()
    assert found["gradient of y"][:, 5].isnan().all()
    pooled = results(tensors(y, residual=False), windows(SMALL, torch.float32, 3), pool=True)
    assert pooled["output"][:, 5].isnan().all() and not pooled["output"][:, :5].isnan().any()


def test_results_are_the_same_each_time() -> None:
    inputs, grad = (
        tensors(random_images(SMALL, torch.float32, 0), residual=True),
        random_images(SMALL, torch.float32, 3),
    )
    first, second = results(inputs, grad), results(inputs, grad)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_the_kernels_do_not_take_is_pytorchs() -> None:
    y, odd = random_images(SMALL, torch.float32, 0), random_images((2, 17, 4, 4), torch.float32, 0)
    weight, statistics = torch.ones(24), torch.zeros(24)
    assert layers.takes(y, y, weight, statistics)
    assert layers.takes(odd, None, torch.ones(17), torch.zeros(17))
    assert not layers.takes(odd, odd, torch.ones(17), torch.zeros(17))
    assert not layers.takes(y, y.contiguous(), weight, statistics)
    assert not layers.takes(y, y.half(), weight, statistics)
    assert not layers.takes(y.contiguous(), None, weight, statistics)
    assert not layers.takes(y.double(), None, weight, statistics)
    assert not layers.takes(y, None, weight.bfloat16(), statistics)
    assert not layers.takes(y, None, None, statistics)
    assert not layers.takes(y, None, weight, None)
    output = torch.ops.raydali.batch_norm(y, y, None, None, None, None, *SETTINGS, True)
    expected = functional.relu(functional.batch_norm(y, None, None, training=True) + y)
    assert torch.equal(output, expected)
    pooled = torch.ops.raydali.batch_norm(y, y, None, None, None, None, *SETTINGS, True, True)
    assert torch.equal(pooled, functional.max_pool2d(expected, 3, 2, 1))


def test_one_value_per_channel_is_refused() -> None:
    y = torch.zeros(1, 8, 1, 1)
    with pytest.raises(ValueError, match="more than 1 value"):
        torch.ops.raydali.batch_norm(y, None, *torch.ones(4, 8), *SETTINGS, True)


def test_operators_keep_their_contracts() -> None:
    inputs, grad = tensors(random_images((2, 8, 3, 3), torch.float32, 0), residual=True), torch.ones(2, 8, 3, 3)
    grad = grad.contiguous(memory_format=torch.channels_last)
    y, residual, weights = inputs["y"], inputs["residual"], weights_of(inputs)
    running = inputs["running_mean"], inputs["running_var"]
    mean, rstd = operators.statistics(y, *running, *SETTINGS)
    signs = operators.normalize(y, residual, mean, rstd, *weights, True)[1]
    tests = "test_schema", "test_faketensor"
    torch.library.opcheck(operators.statistics, (y, *running, *SETTINGS), test_utils=tests)
    torch.library.opcheck(operators.normalize, (y, residual, mean, rstd, *weights, True), test_utils=tests)
    for other in (None, grad):
        torch.library.opcheck(
            operators.gradients, (grad, other, y, signs, mean, rstd, *weights, True), test_utils=tests
        )
    of_windows = torch.ones(2, 8, 2, 2).contiguous(memory_format=torch.channels_last)
    kept = operators.normalize_and_pool(y, mean, rstd, *weights)[1:]
    torch.library.opcheck(operators.normalize_and_pool, (y, mean, rstd, *weights), test_utils=tests)
    for other in (None, of_windows):
        arguments = of_windows, other, y, *kept, mean, rstd, *weights
        torch.library.opcheck(operators.gradients_of_pool, arguments, test_utils=tests)


@pytest.mark.parametrize(("given", "fuses"), [(None, "True"), ("0", "False")])
def test_kernels_fuse_multiplications_with_additions_unless_the_user_says_no(given: str | None, fuses: str) -> None:
    """Triton warns in each process that compiles if this is not said."""
    code = "import raydali, triton; print(triton.knobs.language.fp_fusion_enabled(None))"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_DEFAULT_FP_FUSION"}
    env |= {} if given is None else {"TRITON_DEFAULT_FP_FUSION": given}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == (fuses, "")


# ---------------------------------------------------------------------------------------------------------------------
# The convolution of the stem


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what became squares."""
    shapes: list[torch.Size] = []
    whole = layers._squares

    def counted(images: torch.Tensor, *sides: int) -> torch.Tensor:
        shapes.append(images.shape)
        return whole(images, *sides)

    monkeypatch.setattr(layers, "_squares", counted)
    return shapes


@pytest.mark.parametrize("shape", [(2, 3, 18, 16), (1, 3, 17, 19), (3, 3, 1, 2)])
def test_it_is_exact(shape: tuple[int, ...], squares: list[torch.Size]) -> None:
    """Sums of few products of 0, 1 and -1 are exact in bf16."""
    images, weight = random_bits(shape, 0), random_bits((8, 3, 7, 7), 1).requires_grad_()
    output = layers.stem_convolution(images, weight, None)
    grad = random_bits(output.shape, 2)
    output.backward(grad)
    exact = weight.detach().double().requires_grad_()
    expected = functional.conv2d(images.double(), exact, None, *layers.STEM_SETTINGS)
    expected.backward(grad.double())
    assert weight.grad is not None and exact.grad is not None
    assert torch.equal(output.double(), expected) and torch.equal(weight.grad.double(), exact.grad)
    assert squares == [shape, weight.shape]
    assert output.is_contiguous(memory_format=torch.channels_last)


def test_other_convolutions_are_pytorchs(squares: list[torch.Size]) -> None:
    images, weight, bias = random_bits((1, 3, 8, 8), 0), random_bits((4, 3, 7, 7), 1), random_bits((4,), 2)
    convolution = torch.ops.raydali.stem_convolution
    assert torch.equal(
        convolution(images, weight, bias), functional.conv2d(images, weight, bias, *layers.STEM_SETTINGS)
    )
    assert len(squares) == 2
    convolution(images.float(), weight.float(), None)
    convolution(images.clone().requires_grad_(), weight, None)
    convolution(images, weight[..., :5], None)
    convolution(images[:, :2], weight[:, :2], None)
    assert len(squares) == 2
    with torch.autocast("cpu", torch.bfloat16):
        assert convolution(images.float(), weight.float(), None).dtype == torch.bfloat16
    assert len(squares) == 4
