"""Semantic segmentation: images and their masks are scaled, cropped and flipped alike.

    image --> window --> resized with antialiasing --> on a canvas, the rest grey     --> flipped --> colours jittered
    mask  --> window --> resized by its nearest pixel --> on a canvas, the rest ignored --> flipped

`graph` transforms images in DALI, `sample` with Pillow for the baseline loader; masks are numpy's, so that no class
ever blends, and Pillow decodes them, since DALI turns a palette into colours. On the CPU the pixels differ from
Pillow's by rounding, at most 2 of 255.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.masked_images import IGNORED, MaskedImages
from raydali.data.index.source import Readable
from raydali.data.read.reading import Cause
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.crops import RandomFlips, Range, resize
from raydali.data.tasks.detection import FILL
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline, Samples, of_each
from raydali.data.tasks.settings import DecoderSettings, require, require_share
from raydali.errors import DataError

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.uint8]
LUMA = 0.299, 0.587, 0.114
"""Weights of red, green and blue in the grey of an image, as Pillow has them."""


@dataclass(frozen=True, kw_only=True)
class Images(Pipeline[MaskedImages], DecoderSettings):
    """The settings that training and validation images share.

    Args:
        canvas: height and width of the outputs, in pixels.
    """

    image_files: ClassVar[int] = 1
    inputs_are: ClassVar[Cause] = "cpu decode"
    canvas: tuple[int, int]

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.canvas) >= 1, f"canvas must be at least 1 pixel high and wide, not {self.canvas}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images (N, *canvas, 3) and masks (N, *canvas, 1), uint8."""
        return "images", "masks"

    def draws(self, ids: Integers, keys: Integers) -> Floats:
        """Return the random numbers (N, 7) of samples: scale, place, flip and jitter; none counts in validation."""
        return np.zeros((len(ids), 7))

    def files(self, source: MaskedImages) -> Sequence[Readable]:
        """Return the images and the masks."""
        return source.inputs, source.targets

    def is_too_large(self, height: int, width: int) -> bool:
        """Return whether an image of this size does not fit on the canvas."""
        return False

    def windows(self, shapes: Integers, draws: Floats) -> tuple[Integers, Integers, Integers]:
        """Return starts and sizes of windows, and the sizes to which they are resized, (N, 2) each: whole images."""
        return np.zeros_like(shapes), shapes, shapes

    def flips(self, numbers: Floats) -> NDArray[np.int32]:
        """Return 1 where these numbers (N,) say that a sample is flipped, and 0 elsewhere."""
        return np.zeros(len(numbers), np.int32)

    def inputs(self, source: MaskedImages, samples: Samples) -> Inputs:
        """Return starts, sizes and resized sizes of windows (N, 2), flips (N,) and masks (N, *canvas, 1).

        Raises:
            SampleErrors: a mask cannot be decoded, or has another size; or the image does not fit on the canvas.
        """
        (shapes,), (files,) = samples.shapes, samples.contents
        draws = self.draws(samples.ids, samples.keys)
        placed, flips = self.windows(shapes, draws), self.flips(draws[:, 3])

        def mask(id: int, file: NDArray[np.uint8], shape: Integers, *window: Any) -> Mask:
            height, width = shape.tolist()
            mask = source.mask_in(id, file)
            if mask.shape != (height, width):
                sizes = f"{width}x{height} pixels, but its mask {mask.shape[1]}x{mask.shape[0]}"
                raise DataError(f"{sizes}: give both one size")
            if self.is_too_large(height, width):
                most = f"{self.canvas[1]}x{self.canvas[0]}"
                raise DataError(f"{width}x{height} pixels, more than {most}: raise --val-size")
            return self.cut(mask, *window)

        masks = np.stack(of_each(mask, samples.ids.tolist(), files, shapes, *placed, flips))
        starts, sizes, small = (array.astype(np.int32) for array in placed)
        return starts, sizes, small.astype(np.float32) if samples.device == "gpu" else small, flips, masks

    def cut(self, mask: Mask, start: Integers, size: Integers, small: Integers, flip: int) -> Mask:
        """Return a mask's window (*canvas, 1), resized by its nearest pixels."""
        rows, columns = (start[i] + ((np.arange(small[i]) + 0.5) * size[i] / small[i]).astype(int) for i in (0, 1))
        canvas = np.full((*self.canvas, 1), IGNORED, np.uint8)
        canvas[: small[0], : small[1], 0] = mask.take(rows, 0).take(columns, 1)
        return canvas[:, ::-1] if flip else canvas

    def graph(self, source: MaskedImages, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode only the windows of images, resize them, put them on the canvas and flip them."""
        from nvidia.dali import fn

        from raydali.data.tasks import dali_ops

        encoded, starts, sizes, small, flips, masks, *others = inputs
        options = self.decoder_options(device)
        images = fn.decoders.image_slice(encoded, start=starts, shape=sizes, axes=[0, 1], **options)
        masks = fn.reshape(masks, layout="HWC")
        if device == "cpu":
            images = dali_ops.each_image(partial(_on_canvas, canvas=self.canvas), images, small)
            return fn.flip(images, horizontal=flips), masks, *others
        images = fn.resize(images, size=small)
        images = fn.slice(
            images, start=[0, 0], shape=self.canvas, axes=[0, 1], out_of_bounds_policy="pad", fill_values=FILL
        )
        return fn.flip(images, horizontal=flips), masks.gpu(), *(other.gpu() for other in others)

    def sample(self, source: MaskedImages, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return by Pillow: image (3, *canvas) and mask (1, *canvas), uint8.

        Raises:
            SampleErrors: see `inputs`.
        """
        import torch
        from PIL import Image
        from torchvision.transforms.v2 import functional as F

        from raydali.data.decode.pillow import decoded

        image = decoded(source.inputs.read(id))
        samples = Samples.one(id, epoch, (image.height, image.width), content=source.targets.read(id))
        (start,), (size,), (small,), (flip,), (mask,), *others = self.inputs(source, samples)
        window = image.crop((start[1], start[0], start[1] + size[1], start[0] + size[0]))
        canvas = Image.new("RGB", self.canvas[::-1], FILL)
        canvas.paste(F.resize(window, small.tolist()), (0, 0))
        pixels = F.pil_to_tensor(canvas)
        mask = torch.from_numpy(mask).permute(2, 0, 1)
        return pixels.flip(2) if flip else pixels, mask, *(torch.from_numpy(other[0]) for other in others)


@dataclass(frozen=True, kw_only=True)
class TrainImages(RandomFlips, Images):
    """A random scale, crop and flip of image and mask, and a jitter of the image's colours.

    They depend on (seed, epoch, id) only. An image is scaled so that its shorter side is a random multiple of
    `base_size`, and the canvas is cropped of it; a smaller one leaves a part of the canvas ignored, as in torchvision's
    reference.

    Args:
        base_size: length of the shorter side at a scale of 1, in pixels.
        scales: smallest and largest scale.
        jitter: largest change of brightness, contrast and saturation, as a share.
    """

    base_size: int
    scales: Range = (0.5, 2.0)
    jitter: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.scales
        require(0 < low <= high, f"scales must be (low, high) with 0 < low <= high, not {self.scales}")
        require(self.base_size >= 1, f"base_size must be at least 1, not {self.base_size}")
        require_share(jitter=self.jitter)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The outputs of `Images`, and with a jitter its factors (N, 3) float32, of which `finish` makes use."""
        return (*super().outputs, "factors") if self.jitter else super().outputs

    def draws(self, ids: Integers, keys: Integers) -> Floats:
        """Draw as `Images` says."""
        return uniforms(7, self.seed, keys, ids)

    def windows(self, shapes: Integers, draws: Floats) -> tuple[Integers, Integers, Integers]:
        """Return as `Images` says; the window has whole pixels of the original."""
        low, high = self.scales
        shorter = np.rint(self.base_size * (low + (high - low) * draws[:, :1]))
        scale = shorter.clip(1) / shapes.min(1, keepdims=True)
        scaled = np.rint(shapes * scale).clip(1)
        small = np.minimum(scaled, self.canvas)
        first = np.floor(draws[:, 1:3] * (scaled - small + 1))
        factor = shapes / scaled
        starts = np.floor(first * factor)
        ends = np.ceil((first + small) * factor).clip(starts + 1, shapes)
        return starts.astype(np.int64), (ends - starts).astype(np.int64), small.astype(np.int64)

    def inputs(self, source: MaskedImages, samples: Samples) -> Inputs:
        """Return as `Images` says, and the jitter's factors (N, 3) of brightness, contrast and saturation."""
        inputs = super().inputs(source, samples)
        if not self.jitter:
            return inputs
        numbers = self.draws(samples.ids, samples.keys)[:, 4:]
        return *inputs, (1 + self.jitter * (2 * numbers - 1)).astype(np.float32)

    def finish(self, tensors: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Change the brightness, contrast and saturation of the images, in this order, on their device."""
        if "factors" not in tensors:
            return tensors
        images = tensors["images"].float()
        brightness, contrast, saturation = tensors.pop("factors")[:, :, None, None, None].unbind(1)
        images = (images * brightness).clamp(0, 255)
        grey = images.new_tensor(LUMA)[:, None, None]
        mean = (images * grey).sum(1, keepdim=True).mean((2, 3), keepdim=True)
        images = (mean + (images - mean) * contrast).clamp(0, 255)
        light = (images * grey).sum(1, keepdim=True)
        images = (light + (images - light) * saturation).clamp(0, 255)
        return tensors | {"images": images.round().to(tensors["images"].dtype)}


@dataclass(frozen=True, kw_only=True)
class ValidationImages(Images):
    """Whole images at their own size, on a canvas whose rest is ignored."""

    def is_too_large(self, height: int, width: int) -> bool:
        """Return whether an image is higher or wider than the canvas."""
        return height > self.canvas[0] or width > self.canvas[1]


def _on_canvas(image: Mask, small: Integers, canvas: tuple[int, int]) -> Mask:
    """Return an image (H, W, 3) resized to `small`, in the upper left of a canvas."""
    whole = np.full((*canvas, 3), FILL, np.uint8)
    whole[: small[0], : small[1]] = resize(image, small)
    return whole
