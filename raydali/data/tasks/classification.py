"""Image classification: a random resized crop and flip for training, a centre crop for validation.

    contents --> decode the window --> resize, flip --> augment (`finish`)
    windows, placed by draws from (seed, epoch, id) --^   by draws from the same

`graph` does this in DALI; `sample` uses Pillow and torchvision, for the baseline loader. On the CPU the decoded pixels
are identical to Pillow's (JPEG also in CMYK and YCCK, PNG, WebP, BMP; EXIF orientation is applied). Resized pixels
differ from Pillow's by rounding, at most 2 of 255. The same is true on a GPU, except for the outermost pixels if the
window is scaled down: at the border DALI's filter repeats pixels, and Pillow's filter is cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.augment.augmentation import NO_AUGMENTATION, Augmentation
from raydali.data.sources.labeled import LabeledSource
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks import crops
from raydali.data.tasks.crops import CROP_UNIFORMS, Range, crop_windows, draw_crops
from raydali.data.tasks.image_sizes import ImageSizes
from raydali.data.tasks.pipeline import Device, Inputs, Interpolation, Pipeline
from raydali.data.tasks.settings import (
    SquareImages,
    default_resize_size,
    require_crops,
    require_draws,
    require_resize,
)

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode
    from PIL import Image

Ids = NDArray[np.int64]
Shapes = Sequence[NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Images(Pipeline[LabeledSource], SquareImages):
    """The settings that training and validation images share; see also `SquareImages`.

    Args:
        interpolation: the filter that resizes images.
    """

    image_files: ClassVar[int] = 1
    interpolation: Interpolation = "bilinear"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images (N, image_size, image_size, 3) uint8 and labels (N,) int64."""
        return "images", "labels"


@dataclass(frozen=True, kw_only=True)
class TrainImages(Images):
    """A random resized crop, a random flip and an augmentation, which depend on (seed, epoch, id) only.

    Their distribution is that of torchvision.

    Args:
        seed: seed of the random numbers, 0 or more.
        random_area: bounds of the crop's share of the image's area.
        random_aspect: bounds of the crop's width / height.
        flip_probability: probability of a horizontal flip.
        augmentation: the policy that augments the resized images, and random erasing.
        image_sizes: the size of images in each epoch; None: it is image_size.
    """

    seed: int
    random_area: Range = (0.08, 1.0)
    random_aspect: Range = (3 / 4, 4 / 3)
    flip_probability: float = 0.5
    augmentation: Augmentation = NO_AUGMENTATION
    image_sizes: ImageSizes | None = None

    def __post_init__(self) -> None:
        """Check that values are in their ranges."""
        super().__post_init__()
        require_draws(self.seed, flip_probability=self.flip_probability)
        require_crops(self.random_area, self.random_aspect)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images and labels, and before `finish` of the augmentation's plans (N, rows, 8) float32."""
        return (*super().outputs, "plans") if self.augmentation else super().outputs

    def in_epoch(self, epoch: int) -> Self:
        """Return the pipeline with the image size of the epoch."""
        size = self.image_size if self.image_sizes is None else self.image_sizes.at(epoch)
        return self if size == self.image_size else replace(self, image_size=size)

    def inputs(self, source: LabeledSource, ids: Ids, epochs: Ids) -> Inputs:
        """Return files, random numbers (N, 11, 2) of the crops, flips (N,), labels (N,) int64, and plans."""
        return source.files(ids), *self.draws(ids, epochs), source.labels[ids], *self.plans(ids, epochs)

    def plans(self, ids: Ids, epochs: Ids) -> Inputs:
        """Return the plans (N, rows, 8) of the augmentation, if there is one."""
        return (self.augmentation.draw(self.seed, epochs, ids, self.image_size),) if self.augmentation else ()

    def finish(self, tensors: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return images and labels after the augmentation."""
        if "plans" not in tensors:
            return tensors
        return {"images": self.augmentation.apply(tensors["images"], tensors["plans"]), "labels": tensors["labels"]}

    def compute_crops(self, shapes: Shapes, inputs: Inputs, device: Device) -> Inputs:
        """Return the starts and sizes (N, 2) of the windows, the images' sizes (N, 2), flips, labels and plans.

        For the CPU a flip is 0 or 1. For a GPU flips are the first and the last corner of the result (N, 2, 2), in
        units of the window: to resize from right to left flips the image at no cost.
        """
        draws, flips, *others = map(np.asarray, inputs)
        starts, sizes = crop_windows(shapes[0], draws, self.random_aspect)
        if device == "gpu":
            corners = np.zeros((len(flips), 2, 2), np.float32)
            corners[:, 0, 1], corners[:, 1, 0], corners[:, 1, 1] = flips, 1, 1 - flips
            flips = corners
        resized = np.full((len(flips), 2), self.image_size, np.float32)
        return starts.astype(np.int32), sizes.astype(np.int32), resized, flips, *others

    def graph(self, source: LabeledSource, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode only the windows, resize them with antialiasing, and flip them."""
        from nvidia.dali import fn

        from raydali.data.tasks import dali_ops

        encoded, start, size, resized, flips, *others = inputs
        images = fn.decoders.image_slice(encoded, start=start, shape=size, axes=[0, 1], **self.decoder_options(device))
        if device == "cpu":
            resize = partial(crops.resize, mode=self.interpolation)
            images = dali_ops.each_image(resize, images, resized)
            return fn.flip(images, horizontal=flips), *others
        images = fn.resize(
            images,
            size=resized,
            roi_start=flips[0],
            roi_end=flips[1],
            roi_relative=True,
            interp_type=dali_ops.FILTERS[self.interpolation],
        )
        return images, *(node.gpu() for node in others)

    def sample(self, source: LabeledSource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same crop and flip, made by Pillow: image (3, image_size, image_size) uint8, label, plan."""
        import torch
        from torchvision.transforms.v2 import functional as F

        from raydali.data.tasks.pillow import decoded

        image = decoded(source.read(id))
        draws, flips = self.draws(np.array([id]), np.array([epoch]))
        shapes = np.array([[image.height, image.width]])
        (start,), (size,) = crop_windows(shapes, draws, self.random_aspect)
        image = F.resized_crop(
            image,
            *start.tolist(),
            *size.tolist(),
            size=[self.image_size] * 2,
            interpolation=F.InterpolationMode(self.interpolation),
        )
        plans = (torch.from_numpy(plan[0]) for plan in self.plans(np.array([id]), np.array([epoch])))
        return *_tensors(F.horizontal_flip(image) if flips[0] else image, source, id), *plans

    def from_decoded(self, images: "torch.Tensor", *inputs: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        """Return the same crops and flips of decoded images of one size, and labels and plans."""
        starts, sizes, _, flips, *others = inputs
        images = crops.resized_windows(images, starts, sizes, (self.image_size, self.image_size), self.interpolation)
        if flips.any():
            flipped = flips.to(images.device, non_blocking=True).bool()[:, None, None, None]
            images = images.where(~flipped, images.flip(-1))
        return images, *others

    def draws(self, ids: Ids, epochs: Ids) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Draw the random numbers of samples: those of crops (N, 11, 2), see `draw_crops`, and flips (N,), 0 or 1."""
        numbers = uniforms(CROP_UNIFORMS + 1, self.seed, epochs, ids)
        flips = (numbers[:, -1] < self.flip_probability).astype(np.int32)
        return draw_crops(numbers[:, :-1], self.random_area, self.random_aspect), flips


@dataclass(frozen=True, kw_only=True)
class ValidationImages(Images):
    """The centre of the image after its shorter side is resized: torchvision's Resize and CenterCrop.

    Args:
        resize_size: length of the resized shorter side, at least image_size. None: 8/7 of image_size, like 256 for 224.
    """

    resize_size: int | None = None

    def __post_init__(self) -> None:
        """Check that values are in their ranges."""
        super().__post_init__()
        require_resize(self.shorter_side, self.image_size)

    @property
    def shorter_side(self) -> int:
        """The length of the resized shorter side, in pixels."""
        return default_resize_size(self.image_size) if self.resize_size is None else self.resize_size

    def inputs(self, source: LabeledSource, ids: Ids, epochs: Ids) -> Inputs:
        """Return files and labels (N,) int64; nothing is random."""
        return source.files(ids), source.labels[ids]

    def compute_crops(self, shapes: Shapes, inputs: Inputs, device: Device) -> Inputs:
        """Return starts and ends (N, 2) of the centre crops in the originals, in pixels, not rounded; and labels.

        For the CPU return only the labels.
        """
        if device == "cpu":
            return inputs
        (originals,) = shapes
        resized = self.shorter_side * originals // originals.min(1, keepdims=True)
        starts = np.rint((resized - self.image_size) / 2)
        scale = originals / resized
        return (starts * scale).astype(np.float32), ((starts + self.image_size) * scale).astype(np.float32), *inputs

    def graph(self, source: LabeledSource, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode the images, and resize only the part that the centre crop shows."""
        from nvidia.dali import fn

        from raydali.data.tasks import dali_ops

        images, side = fn.decoders.image(inputs[0], **self.decoder_options(device)), self.image_size
        if device == "cpu":
            crop = partial(crops.resize_and_crop, shorter=self.shorter_side, side=side, mode=self.interpolation)
            return dali_ops.each_image(crop, images), inputs[1]
        start, end, labels = inputs[1:]
        filter = dali_ops.FILTERS[self.interpolation]
        return fn.resize(images, size=(side, side), roi_start=start, roi_end=end, interp_type=filter), labels.gpu()

    def from_decoded(self, images: "torch.Tensor", *inputs: "torch.Tensor") -> tuple["torch.Tensor", ...]:
        """Return the same crops of decoded images of one size, and labels."""
        import torch

        height, width = (self.shorter_side * length // min(images.shape[2:]) for length in images.shape[2:])
        whole = torch.tensor([images.shape[2:]])
        images = crops.resized_windows(
            images, torch.zeros_like(whole), whole, (height, width), self.interpolation, centre=self.image_size
        )
        return images, *inputs

    def sample(self, source: LabeledSource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same crop, made by Pillow: image (3, image_size, image_size) uint8, label."""
        from torchvision.transforms.v2 import functional as F

        from raydali.data.tasks.pillow import decoded

        image, shorter = decoded(source.read(id)), self.shorter_side
        if crops.is_thin(image.height, image.width, shorter):
            return _tensors(crops.pillow_centre(image, shorter, self.image_size, self.interpolation), source, id)
        resized = F.resize(image, [shorter], interpolation=F.InterpolationMode(self.interpolation))
        return _tensors(F.center_crop(resized, [self.image_size]), source, id)


def _tensors(image: "Image.Image", source: LabeledSource, id: int) -> tuple["torch.Tensor", ...]:
    import torch
    from torchvision.transforms.v2 import functional as F

    return F.pil_to_tensor(image), torch.tensor(source.labels[id])
