"""The samples of detection.py by Pillow and torchvision: the same crops, flips and boxes, for the baseline loader."""

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from raydali.data.sources.coco import Coco
from raydali.data.tasks.detection import FILL, TrainImages, ValidationImages, corners, differs, fitted, moved, padded
from raydali.data.tasks.pillow import decoded
from raydali.errors import DataError


def train_sample(settings: TrainImages, source: Coco, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
    """`TrainImages.sample`."""
    image, shape = _image(source, id)
    ids = np.array([id])
    draws, crops, flips = settings.draws(ids, np.array([epoch]))
    starts, sizes = settings.chosen(shape[None], draws, crops)
    boxes, labels = moved(*padded(source, ids, settings.max_boxes), starts, sizes, flips, settings.image_size)
    (top, left), (height, width) = starts[0].tolist(), sizes[0].tolist()
    square = _into_square(image.crop((left, top, left + width, top + height)), settings.image_size)
    pixels = F.pil_to_tensor(F.horizontal_flip(square) if flips[0] else square)
    return pixels, torch.from_numpy(boxes[0]), torch.from_numpy(labels[0])


def validation_sample(settings: ValidationImages, source: Coco, id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`ValidationImages.sample`."""
    image, shape = _image(source, id)
    return F.pil_to_tensor(_into_square(image, settings.image_size)), torch.from_numpy(shape)


def _image(source: Coco, id: int) -> tuple[Image.Image, np.ndarray]:
    image = decoded(source.read(id))
    shape = np.array([image.height, image.width])
    if differs(source.sizes[[id]], shape[None])[0]:
        height, width = source.sizes[id].tolist()
        raise DataError(
            f"{image.width}x{image.height} pixels, its orientation applied, but {width}x{height} in the annotations: "
            f"its boxes would lie anywhere; correct the annotations or the image"
        )
    return image, shape


def _into_square(image: Image.Image, side: int) -> Image.Image:
    small = fitted(np.array([image.height, image.width]), side)
    top, left = corners(small, side).tolist()
    square = Image.new("RGB", (side, side), FILL)
    square.paste(F.resize(image, small.tolist()), (left, top))
    return square
