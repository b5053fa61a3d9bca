"""The network that restores, its loss, and PSNR and SSIM that count each image once on any number of ranks."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from raydali.data.load.loader import Batch
from raydali.data.stream.stream import OrderedPass
from raydali.training.evaluation.restoration import HIGHEST_PSNR, RestorationNetwork, charbonnier, evaluate, restore
from raydali.training.forward_backward import Precision
from raydali.training.worker import Worker

CPU = torch.device("cpu")
WORKER = Worker(rank=0, world_size=1, device=CPU, cpus=1, node="here")
PRECISION = Precision("fp32", CPU)


class Scaled(nn.Module):
    """Restores by making images brighter."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images / 255 * 1.5 + 0.001


class Unchanged(nn.Module):
    """Changes nothing."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images / 255


def images(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, 3, 24, 32), generator=generator, dtype=torch.uint8)


TARGETS = images(10, 0)
INPUTS = (TARGETS.float() * 0.6 + 3).to(torch.uint8)


def batches(rank: int = 0, world_size: int = 1, batch_size: int = 4) -> Iterator[Batch]:
    for micro_batch in OrderedPass(samples=10, batch_size=batch_size).micro_batches(rank, world_size):
        ids = torch.from_numpy(micro_batch.ids)
        yield Batch({"inputs": INPUTS[ids], "targets": TARGETS[ids]}, micro_batch)


def psnr(image: np.ndarray, truth: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / ((image.astype(float) - truth) ** 2).mean()))


@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (1, 3, 17, 24), (1, 3, 5, 3), (1, 3, 1, 1)])
def test_the_network_begins_as_the_identity_for_any_size(shape: tuple[int, ...]) -> None:
    network, inputs = RestorationNetwork(channels=8, blocks=2), torch.rand(shape)
    torch.testing.assert_close(network(inputs), inputs)
    network(inputs).sum().backward()
    torch.nn.init.normal_([*network.parameters()][-2])
    assert network(inputs).shape == shape and (network(inputs) - inputs).abs().mean() > 0.01


def test_size_of_the_network() -> None:
    def parameters(network: nn.Module) -> int:
        return sum(parameter.numel() for parameter in network.parameters())

    assert parameters(RestorationNetwork(channels=64, blocks=4)) == pytest.approx(309_000, abs=500)
    assert parameters(RestorationNetwork(channels=48, blocks=3)) < 150_000


def test_charbonnier_is_the_absolute_error_softened() -> None:
    targets = torch.tensor([0, 255, 51], dtype=torch.uint8)
    loss = charbonnier(torch.tensor([0.0, 0.5, 0.2]), targets)
    assert loss.item() == pytest.approx((0.001 + (0.25 + 1e-6) ** 0.5 + 0.001) / 3, rel=1e-4)


def test_figures_are_means_over_images_as_they_would_be_saved() -> None:
    result = evaluate(Scaled(), batches(), WORKER, PRECISION)
    output = restore(Scaled(), INPUTS, PRECISION)
    assert output.dtype == torch.uint8
    np.testing.assert_array_equal(output, np.clip(np.rint(INPUTS.numpy() * 1.5 + 0.255), 0, 255))
    assert result["images"] == 10
    assert result["psnr"] == pytest.approx(np.mean([*map(psnr, output.numpy(), TARGETS.numpy())]), rel=1e-5)
    assert result["input_psnr"] == pytest.approx(np.mean([*map(psnr, INPUTS.numpy(), TARGETS.numpy())]), rel=1e-5)
    assert result["psnr"] > result["input_psnr"] + 5 and 0.8 < result["ssim"] < 1
    assert result["loss"] == pytest.approx(charbonnier(Scaled()(INPUTS), TARGETS).item(), rel=1e-5)


def test_each_image_counts_once_whatever_the_batches() -> None:
    expected = evaluate(Scaled(), batches(), WORKER, PRECISION)
    for batch_size in (1, 3, 10):
        result = evaluate(Scaled(), batches(batch_size=batch_size), WORKER, PRECISION)
        for name in ("images", "loss", "psnr", "ssim", "input_psnr"):
            assert result[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_perfect_image_does_not_make_the_mean_infinite() -> None:
    perfect = [Batch({"inputs": TARGETS, "targets": TARGETS}, batch.micro_batch) for batch in batches(batch_size=10)]
    result = evaluate(Unchanged(), perfect, WORKER, PRECISION)
    assert (result["psnr"], result["input_psnr"]) == (HIGHEST_PSNR, HIGHEST_PSNR)
    assert result["ssim"] == pytest.approx(1)


def test_the_model_is_in_evaluation_mode_meanwhile() -> None:
    modes = []

    class Noted(Scaled):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            modes.append(self.training)
            return super().forward(images)

    model = Noted()
    evaluate(model, batches(), WORKER, PRECISION)
    restore(model, INPUTS, PRECISION)
    assert modes == [False] * 4 and model.training
