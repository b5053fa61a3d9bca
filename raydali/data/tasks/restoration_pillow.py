"""The samples of restoration.py by Pillow: the same windows and flips, for the baseline loader."""

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from raydali.data.sources.files import Files
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.tasks.pillow import decoded
from raydali.data.tasks.restoration import Pairs, windows
from raydali.errors import DataError


def pair_sample(settings: Pairs, source: ImagePairs, id: int, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`Pairs.sample`."""
    image, target = _image(source.inputs, id), _image(source.targets, id)
    if image.size != target.size:
        raise DataError(f"{_size(image)} and {_size(target)} pixels: the two of a pair must have one size")
    height, width = settings.crop_size
    if image.height < height or image.width < width:
        raise DataError(
            f"{_size(image)} pixels, smaller than the crop of {width}x{height}: lower its size, or leave the pair out"
        )
    places, ((vertical, horizontal),) = settings.draws(np.array([id]), np.array([epoch]))
    ((top, left),) = windows(np.array([[image.height, image.width]]), places, settings.crop_size).tolist()

    def cropped(image: Image.Image) -> torch.Tensor:
        pixels: torch.Tensor = F.pil_to_tensor(image.crop((left, top, left + width, top + height)))
        return pixels.flip([axis for axis, flips in ((1, vertical), (2, horizontal)) if flips])

    return cropped(image), cropped(target)


def _image(files: Files, id: int) -> Image.Image:
    try:
        return decoded(files.read(id))
    except Exception as error:
        raise DataError(f"{files.path(id)}: {error}") from error


def _size(image: Image.Image) -> str:
    return f"{image.width}x{image.height}"
