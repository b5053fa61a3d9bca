"""Image classification: a random resized crop and flip for training, a centre crop for validation.

    contents --> decode the window --> resize, flip --> augment (`finish`)
    windows, placed by draws from (seed, epoch, id) --^   by draws from the same

`graph` does this in DALI; `sample` uses Pillow and torchvision, for the baseline loader. On the CPU the decoded pixels
are identical to Pillow's (JPEG also in CMYK and YCCK, PNG, WebP, BMP; EXIF orientation is applied). Resized pixels
differ from Pillow's by rounding, at most 2 of 255. The same is true on a GPU, except for the outermost pixels if the
window is scaled down: at the border DALI's filter repeats pixels, and Pillow's filter is cut off.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.augment.augmentation import NO_AUGMENTATION, Augmentation
from raydali.data.index.labeled import LabeledSource
from raydali.data.index.source import Readable
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks import crops
from raydali.data.tasks.crops import CROP_UNIFORMS, RandomCrops
from raydali.data.tasks.pipeline import Device, Inputs, Interpolation, Pipeline, Samples
from raydali.data.tasks.settings import DecoderSettings, ResizedImages, SquareImages
from raydali.errors import UsageError

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode
    from PIL import Image

SIZE_STEP = 32
"""Sizes between the first and the last one are multiples of it, in pixels."""
_SIZES = re.compile(r"(\d+):(\d+)@(\d+)-(\d+)")

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Images(Pipeline[LabeledSource], DecoderSettings, SquareImages):
    """The settings that training and validation images share; see also `DecoderSettings` and `SquareImages`.

    Args:
        interpolation: the filter that resizes images.
    """

    image_files: ClassVar[int] = 1
    interpolation: Interpolation = "bilinear"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images (N, image_size, image_size, 3) uint8 and labels (N,) int64."""
        return "images", "labels"

    def files(self, source: LabeledSource) -> Sequence[Readable]:
        """Return the images."""
        return (source,)


@dataclass(frozen=True, kw_only=True)
class TrainImages(RandomCrops, Images):
    """A random resized crop, a random flip and an augmentation, which depend on (seed, epoch, id) only.

    Their distribution is the same as in torchvision. See also `RandomCrops`; the flip is horizontal.

    Args:
        augmentation: the policy that augments the resized images, and random erasing.
        image_sizes: the size of images in each epoch; None: it is image_size.
    """

    augmentation: Augmentation = NO_AUGMENTATION
    image_sizes: "ImageSizes | None" = None

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images and labels, and before `finish` of the augmentation's plans (N, rows, 8) float32."""
        return ("images", "labels", "plans") if self._augments else ("images", "labels")

    @cached_property
    def _augments(self) -> bool:
        return bool(self.augmentation)

    def in_epoch(self, epoch: int) -> Self:
        """Return the pipeline with the image size of the epoch."""
        size = self.image_size if self.image_sizes is None else self.image_sizes.at(epoch)
        return self if size == self.image_size else replace(self, image_size=size)

    def inputs(self, source: LabeledSource, samples: Samples) -> Inputs:
        """Return starts and sizes (N, 2) of the windows, the images' sizes (N, 2), flips, labels (N,) int64 and plans.

        For the CPU a flip is 0 or 1. For a GPU flips are the first and the last corner of the result (N, 2, 2), in
        units of the window: to resize from right to left flips the image at no cost.
        """
        draws, flips = self.draws(samples.ids, samples.keys)
        starts, sizes = self.crop_windows(samples.shapes[0], draws)
        resized = np.full((len(flips), 2), self.image_size, np.float32)
        others = source.labels[samples.ids], *self.plans(samples.ids, samples.keys)
        return starts.astype(np.int32), sizes.astype(np.int32), resized, _flips(flips, samples.device), *others

    def plans(self, ids: Ids, keys: Ids) -> Inputs:
        """Return the plans (N, rows, 8) of the augmentation, if there is one."""
        return (self.augmentation.draw(self.seed, keys, ids, self.image_size),) if self._augments else ()

    def finish(self, tensors: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return images and labels after the augmentation."""
        if "plans" not in tensors:
            return tensors
        return {"images": self.augmentation.apply(tensors["images"], tensors["plans"]), "labels": tensors["labels"]}

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

        from raydali.data.decode.pillow import decoded

        image = decoded(source.read(id))
        draws, flips = self.draws(np.array([id]), np.array([epoch]))
        (start,), (size,) = self.crop_windows(np.array([[image.height, image.width]]), draws)
        image = F.resized_crop(
            image,
            *start.tolist(),
            *size.tolist(),
            size=[self.image_size] * 2,
            interpolation=F.InterpolationMode(self.interpolation),
        )
        plans = (torch.from_numpy(plan[0]) for plan in self.plans(np.array([id]), np.array([epoch])))
        return *_tensors(F.horizontal_flip(image) if flips[0] else image, source, id), *plans

    def draws(self, ids: Ids, keys: Ids) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """Draw the random numbers of samples: of crops (N, 11, 2), see `draw_crops`, and of flips (N,), 0 or 1."""
        numbers = uniforms(CROP_UNIFORMS + 1, self.seed, keys, ids)
        return self.draw_crops(numbers[:, :-1]), self.flips(numbers[:, -1])


@dataclass(frozen=True, kw_only=True)
class ValidationImages(ResizedImages, Images):
    """The centre of the image after its shorter side is resized: torchvision's Resize and CenterCrop."""

    def inputs(self, source: LabeledSource, samples: Samples) -> Inputs:
        """Return starts and ends (N, 2) of the centre crops in the originals, in pixels, not rounded; and labels.

        For the CPU return only the labels (N,) int64; nothing is random.
        """
        labels = source.labels[samples.ids]
        if samples.device == "cpu":
            return (labels,)
        (originals,) = samples.shapes
        resized, starts = crops.centre(originals, self.shorter_side, self.image_size)
        scale = originals / resized
        return (starts * scale).astype(np.float32), ((starts + self.image_size) * scale).astype(np.float32), labels

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

    def sample(self, source: LabeledSource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same crop, made by Pillow: image (3, image_size, image_size) uint8, label."""
        from raydali.data.decode.pillow import decoded

        image = decoded(source.read(id))
        return _tensors(crops.pillow_centre(image, self.shorter_side, self.image_size, self.interpolation), source, id)


def _flips(flips: NDArray[np.int32], device: Device) -> NDArray[Any]:
    if device == "cpu":
        return flips
    corners = np.zeros((len(flips), 2, 2), np.float32)
    corners[:, 0, 1], corners[:, 1, 0], corners[:, 1, 1] = flips, 1, 1 - flips
    return corners


def _tensors(image: "Image.Image", source: LabeledSource, id: int) -> tuple["torch.Tensor", ...]:
    import torch
    from torchvision.transforms import functional as F

    return F.pil_to_tensor(image), torch.tensor(source.labels[id])


@dataclass(frozen=True)
class ImageSizes:
    """The height and width of training images, in pixels, in each epoch (progressive resizing).

        size
        192                          ______     --image-size 160:192@65-76: epochs 0 to 65 train on the first size,
        160   ______________________/           epochs from 76 on, on the last one; between them it grows linearly,
              epoch 0              65    76     in steps of SIZE_STEP

    The schedule is FFCV's: github.com/libffcv/ffcv-imagenet, train_imagenet.py, `get_resolution`.

    Args:
        first, last: the sizes up to epoch `begin`, and from epoch `end` on.
        begin, end: the epochs between which the size changes.

    Raises:
        UsageError: a size is below 1, or the ramp does not begin before its end.
    """

    first: int
    last: int
    begin: int = 0
    end: int = 1

    def __post_init__(self) -> None:
        if min(self.first, self.last) < 1:
            raise UsageError(f"--image-size must be at least 1, not {min(self.first, self.last)}")
        if self.begin >= self.end:
            raise UsageError(
                f"--image-size {self.first}:{self.last}@{self.begin}-{self.end} must begin before its end: "
                f"try {self.first}:{self.last}@{self.begin}-{self.begin + 1}"
            )

    @classmethod
    def parse(cls, option: int | str) -> "ImageSizes":
        """Return the sizes that `--image-size` gives: one, or FIRST:LAST@EPOCH-EPOCH.

        Raises:
            UsageError: it gives neither.
        """
        if isinstance(option, int):
            return cls(option, option)
        if (form := _SIZES.fullmatch(option)) is None:
            raise UsageError(
                f"--image-size {option} is neither a size such as 224, nor FIRST:LAST@EPOCH-EPOCH such as 160:192@65-76"
            )
        return cls(*map(int, form.groups()))

    def at(self, epoch: int) -> int:
        """Return the size of the epoch, counted from 0, in pixels."""
        if epoch <= self.begin:
            return self.first
        if epoch >= self.end:
            return self.last
        between = np.interp(epoch, [self.begin, self.end], [self.first, self.last])
        smallest, largest = sorted((self.first, self.last))
        return int(np.clip(np.round(between / SIZE_STEP) * SIZE_STEP, smallest, largest))

    def all(self, epochs: int) -> list[int]:
        """Return the different sizes of a run of so many epochs, in their order."""
        return [*dict.fromkeys(self.at(epoch) for epoch in range(epochs))]


def validation_size(settings: Mapping[str, Any]) -> int | None:
    """Return the size of a run's validation images, in pixels; None if its settings have no image size."""
    size, sizes = settings.get("val_image_size"), settings.get("image_size")
    return size or (None if sizes is None else ImageSizes.parse(sizes).last)
