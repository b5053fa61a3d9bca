"""Augmentation on the CPU, image by image, by torch and torchvision."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch.nn import functional
from torchvision.transforms.v2 import functional as F

from raydali.data.augment.operations import BLUR_RADIUS, Kind

Colour = Sequence[int]


def augmented(
    images: torch.Tensor,
    plans: torch.Tensor,
    *,
    slots: int,
    chains: int,
    fill: Colour,
    colour: Colour,
    nearest: bool,
) -> torch.Tensor:
    """Return the augmented images; see `Augmentation.apply`.

    Args:
        images: (N, 3, H, W) uint8.
        plans: (N, chains * slots + 1, WIDTH).
        slots: number of operations in a chain.
        chains: number of chains that each image has.
        fill: colour outside of warped images.
        colour: colour of erased rectangles.
        nearest: whether warps take the nearest pixel, instead of bilinear means.
    """
    colour_of_erased = torch.tensor(colour, dtype=torch.uint8)[:, None, None]
    results = torch.empty_like(images)

    def augment(index: int) -> None:
        *rows, last = plans[index].tolist()
        ends = []
        for chain in range(chains):
            end = images[index]
            for kind, *parameters in rows[chain * slots : (chain + 1) * slots]:
                if kind:
                    end = apply(end, Kind(int(kind)), parameters, fill, nearest=nearest)
            ends.append(end)
        if chains == 1:
            results[index] = ends[0]
        else:
            results[index] = sum(weight * end for weight, end in zip(last[4:], [images[index], *ends], strict=False))
        top, left, height, width = map(int, last[:4])
        results[index, :, top : top + height, left : left + width] = colour_of_erased

    for _ in _threads().map(augment, range(len(images))):
        pass
    return results


@cache
def _threads() -> ThreadPoolExecutor:
    # Each thread does whole images: it must not start torch's own threads as well.
    return ThreadPoolExecutor(torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,))


def apply(image: torch.Tensor, kind: Kind, parameters: Sequence[float], fill: Colour, *, nearest: bool) -> torch.Tensor:
    """Return an image (3, H, W) uint8 after one operation with the parameters of its row."""
    if kind is Kind.WARP:
        return _warp(image, parameters, fill, nearest=nearest)
    return _OPERATIONS[kind](image, parameters[0])


def _warp(image: torch.Tensor, matrix: Sequence[float], fill: Colour, *, nearest: bool) -> torch.Tensor:
    theta = torch.tensor([matrix[:3], matrix[3:6]], dtype=torch.float32)
    theta[:, 2] /= torch.tensor([image.shape[2] / 2, image.shape[1] / 2])  # grid_sample's unit is half of a side
    grid = functional.affine_grid(theta[None], [1, *image.shape], align_corners=False)
    outside = torch.tensor(fill, dtype=torch.float32)[:, None, None]
    mode = "nearest" if nearest else "bilinear"
    warped: torch.Tensor = functional.grid_sample((image - outside)[None], grid, mode, "zeros", align_corners=False)
    return (warped[0] + outside).round_().to(torch.uint8)


def _solarized(image: torch.Tensor, threshold: float) -> torch.Tensor:
    return torch.where(image >= threshold, 255 - image, image)


def _solarized_by_addition(image: torch.Tensor, addend: float) -> torch.Tensor:
    return torch.where(image < 128, image + int(addend), image)  # 128 + 110 is below 256


def _blurred(sizes: Sequence[int]) -> Callable[[torch.Tensor, float], torch.Tensor]:
    return lambda image, sigma: F.gaussian_blur(image, [*sizes], [sigma, sigma])


_OPERATIONS: dict[Kind, Callable[[torch.Tensor, float], torch.Tensor]] = {
    Kind.BRIGHTNESS: F.adjust_brightness,
    Kind.CONTRAST: F.adjust_contrast,
    Kind.POSTERIZE: lambda image, bits: F.posterize(image, int(bits)),
    Kind.SOLARIZE: _solarized,
    Kind.SOLARIZE_ADD: _solarized_by_addition,
    Kind.AUTOCONTRAST: lambda image, _: F.autocontrast(image),
    Kind.EQUALIZE: lambda image, _: F.equalize(image),
    Kind.SATURATION: F.adjust_saturation,
    Kind.HUE: F.adjust_hue,
    Kind.SHARPNESS: F.adjust_sharpness,
    Kind.BLUR_ROWS: _blurred([2 * BLUR_RADIUS + 1, 1]),
    Kind.BLUR_COLUMNS: _blurred([1, 2 * BLUR_RADIUS + 1]),
}
