"""The samples of classification.py by Pillow and torchvision: the same crops and flips, for the baseline loader."""

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as F

from raydali.data.sources.labeled import LabeledSource
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.data.tasks.pillow import centre, decoded, is_thin
from raydali.data.tasks.random_crops import crop_windows

Sample = tuple[torch.Tensor, torch.Tensor]


def train_sample(settings: TrainImages, source: LabeledSource, id: int, epoch: int) -> Sample:
    """`TrainImages.sample`."""
    image = decoded(source.read(id))
    draws, flips = settings.draws(np.array([id]), np.array([epoch]))
    shapes = np.array([[image.height, image.width]])
    (start,), (size,) = crop_windows(shapes, draws, settings.random_aspect)
    image = F.resized_crop(image, *start.tolist(), *size.tolist(), size=[settings.image_size, settings.image_size])
    return _tensors(F.horizontal_flip(image) if flips[0] else image, source, id)


def validation_sample(settings: ValidationImages, source: LabeledSource, id: int) -> Sample:
    """`ValidationImages.sample`."""
    image = decoded(source.read(id))
    if is_thin(image.height, image.width, settings.shorter_side):
        return _tensors(centre(image, settings.shorter_side, settings.image_size), source, id)
    image = F.resize(image, [settings.shorter_side])
    return _tensors(F.center_crop(image, [settings.image_size]), source, id)


def _tensors(image: Image.Image, source: LabeledSource, id: int) -> Sample:
    return F.pil_to_tensor(image), torch.tensor(source.labels[id])
