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
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.masked_images import IGNORED, MaskedImages
from raydali.data.read.reading import Cause
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.crops import RandomFlips, Range, resize
from raydali.data.tasks.detection import FILL
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
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

    def draws(self, ids: Integers, epochs: Integers) -> Floats:
        """Return the random numbers (N, 7) of samples: scale, place, flip and jitter; none counts in validation."""
        return np.zeros((len(ids), 7))

    def inputs(self, source: MaskedImages, ids: Integers, epochs: Integers) -> Inputs:
        """Return files of images, random numbers (N, 7), and the masks, (height, width) each."""
        return source.inputs.files(ids), self.draws(ids, epochs), source.masks(ids)

    def unfit(self, shapes: Sequence[Integers], inputs: Inputs) -> NDArray[np.bool_]:
        """Return which samples (N,) have a mask of another size, or do not fit on the canvas."""
        masks = np.array([mask.shape for mask in inputs[1]])
        unfit: NDArray[np.bool_] = (shapes[0] != masks).any(1) | self.is_too_large(shapes[0])
        return unfit

    def is_too_large(self, shapes: Integers) -> NDArray[np.bool_]:
        """Return which images of these shapes (N, 2) do not fit on the canvas."""
        return np.zeros(len(shapes), np.bool_)

    def windows(self, shapes: Integers, draws: Floats) -> tuple[Integers, Integers, Integers]:
        """Return starts and sizes of windows, and the sizes to which they are resized, (N, 2) each: whole images."""
        return np.zeros_like(shapes), shapes, shapes

    def flips(self, numbers: Floats) -> NDArray[np.int32]:
        """Return 1 where these numbers (N,) say that a sample is flipped, and 0 elsewhere."""
        return np.zeros(len(numbers), np.int32)

    def compute_crops(self, shapes: Sequence[Integers], inputs: Inputs, device: Device) -> Inputs:
        """Return starts, sizes and resized sizes of windows (N, 2), flips (N,) and masks (N, *canvas, 1)."""
        draws, masks = inputs
        placed = self.windows(shapes[0], np.asarray(draws))
        flips = self.flips(np.asarray(draws)[:, 3])
        cut = np.stack([self.cut(*sample) for sample in zip(masks, *placed, flips, strict=True)])
        starts, sizes, small = (array.astype(np.int32) for array in placed)
        return starts, sizes, small.astype(np.float32) if device == "gpu" else small, flips, cut

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
            DataError: the mask has another size, or the image does not fit on the canvas.
        """
        import torch
        from PIL import Image
        from torchvision.transforms.v2 import functional as F

        from raydali.data.decode.pillow import decoded

        image, mask = decoded(source.inputs.read(id)), source.mask(id)
        shape = np.array([[image.height, image.width]])
        if (image.height, image.width) != mask.shape:
            height, width = mask.shape
            raise DataError(f"{image.width}x{image.height} pixels, but its mask {width}x{height}: give both one size")
        if self.is_too_large(shape)[0]:
            height, width = self.canvas
            raise DataError(f"{image.width}x{image.height} pixels, more than {width}x{height}: raise --val-size")
        draws = self.draws(np.array([id]), np.array([epoch]))
        (start,), (size,), (small,) = self.windows(shape, draws)
        (flip,) = self.flips(draws[:, 3])
        window = image.crop((start[1], start[0], start[1] + size[1], start[0] + size[0]))
        canvas = Image.new("RGB", self.canvas[::-1], FILL)
        canvas.paste(F.resize(window, small.tolist()), (0, 0))
        pixels = F.pil_to_tensor(canvas)
        cut = torch.from_numpy(np.ascontiguousarray(self.cut(mask, start, size, small, flip))).permute(2, 0, 1)
        return pixels.flip(2) if flip else pixels, cut


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

    def draws(self, ids: Integers, epochs: Integers) -> Floats:
        """Draw as `Images` says."""
        return uniforms(7, self.seed, epochs, ids)

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

    def compute_crops(self, shapes: Sequence[Integers], inputs: Inputs, device: Device) -> Inputs:
        """Return as `Images` says, and the factors of the jitter."""
        factors = [self.factors(np.asarray(inputs[0]))] if self.jitter else []
        return *super().compute_crops(shapes, inputs, device), *factors

    def factors(self, draws: Floats) -> NDArray[np.float32]:
        """Return the factors of brightness, contrast and saturation, (N, 3)."""
        return (1 + self.jitter * (2 * draws[:, 4:] - 1)).astype(np.float32)

    def sample(self, source: MaskedImages, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return as `Images` says, and the factors (3,) of the jitter."""
        import torch

        sample = super().sample(source, id, epoch)
        if not self.jitter:
            return sample
        return *sample, torch.from_numpy(self.factors(self.draws(np.array([id]), np.array([epoch])))[0])

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

    def is_too_large(self, shapes: Integers) -> NDArray[np.bool_]:
        """Return which images do not fit on the canvas."""
        too_large: NDArray[np.bool_] = np.asarray((shapes > np.array(self.canvas)).any(1))
        return too_large


def _on_canvas(image: Mask, small: Integers, canvas: tuple[int, int]) -> Mask:
    """Return an image (H, W, 3) resized to `small`, in the upper left of a canvas."""
    whole = np.full((*canvas, 3), FILL, np.uint8)
    whole[: small[0], : small[1]] = resize(image, small)
    return whole
