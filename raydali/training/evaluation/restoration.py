"""Image restoration: a network, its loss, and its evaluation."""

import io
from collections.abc import Iterable, Sequence
from posixpath import splitext

import torch
from torch import nn
from torch.nn import functional as F

from raydali.data.load.loader import Batch
from raydali.training.evaluation.validation import evaluating, require_read
from raydali.training.forward_backward import Precision
from raydali.training.worker import Worker

HIGHEST_PSNR = 100.0
"""The PSNR of a perfectly restored image, in dB: an infinite one would make the mean infinite."""
_EPSILON = 1e-3


class RestorationNetwork(nn.Module):
    """A network that adds a predicted residual to images (N, 3, H, W) in 0..1.

    The blocks are EDSR's (Lim et al., "Enhanced deep residual networks for single image super-resolution", CVPRW
    2017). Pixel-unshuffle by 2, as in FFDNet (Zhang et al., TIP 2018), makes them four times as fast. The last layer
    starts at zero, so the untrained network returns its input.

    Args:
        channels: width of each block; 64 with 4 blocks have 309,000 parameters.
        blocks: number of residual blocks, of two convolutions each.
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
        """Return the restored images in the same shape, not clamped to 0..1."""
        height, width = images.shape[-2:]
        even = F.pad(images, (0, width % 2, 0, height % 2), mode="replicate")
        residual: torch.Tensor = self.layers(even)
        return images + residual[..., :height, :width]


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        residual: torch.Tensor = self.layers(features)
        return features + residual


def charbonnier(restored: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error, smoothed near 0 (Charbonnier et al., ICIP 1994).

    Args:
        restored: (N, 3, H, W) in 0..1.
        targets: (N, 3, H, W) in 0..255.
    """
    return _charbonnier(restored, targets).mean()


def _charbonnier(restored: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((restored - targets / 255) ** 2 + _EPSILON**2).sqrt()


@torch.inference_mode()
def evaluate(model: nn.Module, batches: Iterable[Batch], worker: Worker, precision: Precision) -> dict[str, float]:
    """Compute "loss", "psnr" (dB), "ssim" and "input_psnr", means over all "images".

    PSNR and SSIM are computed per image by torchmetrics, on outputs rounded to 8 bits. Ranks may get unequal numbers of
    batches, or none: they communicate only at the end, to add up sums.

    Args:
        model: maps images in 0..255 to restored ones in 0..1, as `Normalized` does; without DDP.
        batches: the batches of this rank, of "inputs" and "targets" (N, 3, H, W) in 0..255.
        worker: this rank.
        precision: precision of the forward pass.
    """
    sums = torch.zeros(5, dtype=torch.float64, device=worker.device)
    with evaluating(model):
        for batch in batches:
            inputs, targets = batch["inputs"], batch["targets"]
            with precision.autocast():
                output = model(inputs)
            figures = per_image(output, inputs, targets)
            of_images = [figures[name].sum() for name in ("losses", "psnr", "ssim", "input_psnr")]
            sums += torch.stack([torch.full_like(of_images[0], len(inputs)), *of_images])
    count, *of_all = worker.sum(sums).tolist()
    require_read(count, batches)
    means = (total / count for total in of_all)
    return {"images": int(count), **dict(zip(("loss", "psnr", "ssim", "input_psnr"), means, strict=True))}


def per_image(output: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute "losses", "psnr", "ssim" and "input_psnr" of each image, (N,) each.

    Args:
        output: restored images (N, 3, H, W) in 0..1.
        inputs: (N, 3, H, W) in 0..255.
        targets: like the inputs.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure  # takes seconds

    images, truth = in_8_bits(output).float(), targets.float()
    ssim = structural_similarity_index_measure(images, truth, reduction="none", data_range=255.0)
    assert isinstance(ssim, torch.Tensor)
    return {
        "losses": _charbonnier(output.float(), targets).mean((1, 2, 3)),
        "psnr": _psnr(images, truth),
        "ssim": ssim,
        "input_psnr": _psnr(inputs.float(), truth),
    }


@torch.inference_mode()
def restore(model: nn.Module, images: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Restore images (N, 3, H, W), uint8 to uint8; for the model see `evaluate`."""
    with evaluating(model), precision.autocast():
        return in_8_bits(model(images))


def restored_files(_config: object, outputs: torch.Tensor, paths: Sequence[str]) -> dict[str, bytes]:
    """Return restored images (N, 3, H, W) in 0..1 as PNG files, at the paths of their inputs but for the ending."""
    from PIL import Image

    files = {}
    for path, pixels in zip(paths, in_8_bits(outputs).permute(0, 2, 3, 1).cpu().numpy(), strict=True):
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "PNG")
        files[f"{splitext(path)[0]}.png"] = content.getvalue()
    return files


def in_8_bits(images: torch.Tensor) -> torch.Tensor:
    """Round images in 0..1 to 8 bits."""
    return (images.float() * 255).round().clamp(0, 255).to(torch.uint8)


def _psnr(images: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the PSNR of each image in 0..255, in dB."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    psnr = peak_signal_noise_ratio(images, truth, data_range=255.0, reduction="none", dim=(1, 2, 3))
    return psnr.clamp(max=HIGHEST_PSNR)
