"""Image restoration: a network, its loss, and its evaluation."""

import time
from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from raydali.data.loading.loader import Batch
from raydali.errors import DataError
from raydali.train.evaluation.classification import NONE_READ, evaluating
from raydali.train.precision import Precision
from raydali.train.worker import Worker

HIGHEST_PSNR = 100.0
"""In dB: an image restored to the bit counts as this, or one such image would make the mean infinite."""
_SOFTENING = 1e-3


class RestorationNetwork(nn.Module):
    """An image (N, 3, H, W) in 0..1 and what it lacks, found by residual blocks at half its resolution.

    Blocks are those of EDSR (Lim et al., "Enhanced deep residual networks for single image super-resolution", CVPRW
    2017); four pixels in one, which makes them four times as fast, is from FFDNet (Zhang et al., TIP 2018). It begins
    as the identity.

    Args:
        channels: of each block; 64 and 4 blocks are 309,000 parameters.
        blocks: of two convolutions each.
    """

    def __init__(self, *, channels: int, blocks: int) -> None:
        super().__init__()
        last = nn.Conv2d(channels, 12, 3, padding=1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, channels, 3, padding=1),
            *[_Block(channels) for _ in range(blocks)],
            last,
            nn.PixelShuffle(2),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The restored images, of the same shape; not cut off at 0 and 1."""
        height, width = images.shape[-2:]
        even = F.pad(images, (0, width % 2, 0, height % 2), mode="replicate")
        lacking: torch.Tensor = self.layers(even)
        return images + lacking[..., :height, :width]


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.layers(features)
        return features + change


def charbonnier(restored: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean absolute error, softened where it is near 0 (Charbonnier et al., ICIP 1994).

    Args:
        restored: (N, 3, H, W) in units of the full range.
        targets: (N, 3, H, W) in 0..255.
    """
    return ((restored - targets / 255) ** 2 + _SOFTENING**2).sqrt().mean()


class Restoration(TypedDict):
    """Means over all images of all ranks; PSNR in dB, of what was restored and of the inputs as they were."""

    images: int
    loss: float
    psnr: float
    ssim: float
    input_psnr: float
    seconds: float


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Iterable[Batch], worker: Worker, precision: Precision) -> Restoration:
    """Loss, PSNR and SSIM of the unwrapped model over batches of "inputs" and "targets" (N, 3, H, W) in 0..255.

    PSNR and SSIM are torchmetrics', of 8-bit images, each image's own. Ranks may get unequal numbers of batches, or
    none: they communicate only at the end, to add up sums, not means.

    Args:
        model: from images in 0..255 to restored ones in 0..1.
        batches: this rank's.
        worker: this rank.
        precision: of the forward pass.
    """
    began = time.perf_counter()
    sums = torch.zeros(5, dtype=torch.float64, device=worker.device)
    with evaluating(model):
        for batch in batches:
            inputs, targets = batch["inputs"], batch["targets"]
            with precision.autocast():
                output = model(inputs)
            images, truth = _in_8_bits(output).float(), targets.float()
            ssim = structural_similarity_index_measure(images, truth, reduction="none", data_range=255.0)
            assert isinstance(ssim, torch.Tensor)
            loss = charbonnier(output.float(), targets) * len(inputs)
            psnr, input_psnr = _psnr(images, truth).sum(), _psnr(inputs.float(), truth).sum()
            sums += torch.stack([torch.full_like(loss, len(inputs)), loss, psnr, ssim.sum(), input_psnr])
    count, loss_sum, psnr_sum, ssim_sum, input_psnr_sum = worker.sum(sums).tolist()
    if not count:
        raise DataError(NONE_READ)
    return {
        "images": int(count),
        "loss": loss_sum / count,
        "psnr": psnr_sum / count,
        "ssim": ssim_sum / count,
        "input_psnr": input_psnr_sum / count,
        "seconds": time.perf_counter() - began,
    }


@torch.inference_mode()
def restore(model: nn.Module, images: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The restored images (N, 3, H, W), uint8, of uint8 ones; the model as `evaluate` takes it."""
    with evaluating(model), precision.autocast():
        return _in_8_bits(model(images))


def _in_8_bits(images: torch.Tensor) -> torch.Tensor:
    return (images.float() * 255).round().clamp(0, 255).to(torch.uint8)


def _psnr(images: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Of each image in 0..255, dB."""
    psnr = peak_signal_noise_ratio(images, truth, data_range=255.0, reduction="none", dim=(1, 2, 3))
    return psnr.clamp(max=HIGHEST_PSNR)
