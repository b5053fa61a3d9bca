"""Image restoration: both images of a pair get the same crop and flips, without resizing.

    contents of inputs and targets --> decode the window --> flip
    windows, placed by draws from (seed, epoch, id) --^        ^-- flips

`graph` does this in DALI; `sample` uses Pillow, for the baseline loader. On the CPU the pixels are identical to
Pillow's. On a GPU the pixels of JPEGs differ by the rounding of its decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.files import Files
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.source import Readable
from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.crops import RandomFlips
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline, Samples, refuse
from raydali.data.tasks.settings import DecoderSettings, require
from raydali.errors import DataError

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode
    from PIL import Image

Ids = NDArray[np.int64]
Integers = NDArray[np.int64]
Draws = tuple[NDArray[np.float64], NDArray[np.int32]]


@dataclass(frozen=True, kw_only=True)
class Pairs(Pipeline[ImagePairs], DecoderSettings):
    """The settings that training and validation pairs share.

    Args:
        crop_size: height and width of the output, in pixels; no image may be smaller.
    """

    image_files: ClassVar[int] = 2
    crop_size: tuple[int, int]
    largest_image: tuple[int, int] = (1080, 1920)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(min(self.crop_size) >= 1, f"crop_size must be at least 1 pixel high and wide, not {self.crop_size}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of inputs and targets, each (N, *crop_size, 3) uint8."""
        return "inputs", "targets"

    def files(self, source: ImagePairs) -> Sequence[Readable]:
        """Return inputs and targets."""
        return source.inputs, source.targets

    def draws(self, ids: Ids, keys: Ids) -> Draws:
        """Draw the random numbers of samples: here the centre, without flips.

        Returns:
            places: (N, 2), y before x, between the first (0) and the last (1) possible position of the window.
            flips: (N, 2), vertical before horizontal, 0 or 1.
        """
        return np.full((len(ids), 2), 0.5), np.zeros((len(ids), 2), np.int32)

    def inputs(self, source: ImagePairs, samples: Samples) -> Inputs:
        """Return the starts of the windows (N, 2), and flips (N, 2), int32.

        Raises:
            SampleErrors: the images of a pair differ in size, or are smaller than the crop.
        """
        shapes, others = samples.shapes
        (rows, columns), crop = self.crop_size, np.array(self.crop_size)
        refuse(
            (shapes != others).any(1),
            lambda place: DataError(
                f"{_size(shapes[place])} and {_size(others[place])} pixels: both images of a pair must have the same "
                "size"
            ),
        )
        refuse(
            np.asarray((shapes < crop).any(1)),
            lambda place: DataError(
                f"{_size(shapes[place])} pixels, smaller than the crop of {columns}x{rows}: lower its size, or leave "
                "the pair out"
            ),
        )
        places, flips = self.draws(samples.ids, samples.keys)
        return windows(shapes, places, self.crop_size).astype(np.int32), flips

    def graph(self, source: ImagePairs, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode only the windows, and flip them."""
        from nvidia.dali import fn

        encoded, targets, starts, flips = inputs
        options = self.decoder_options(device)

        def cropped(encoded: "DataNode") -> "DataNode":
            images = fn.decoders.image_slice(encoded, start=starts, shape=self.crop_size, axes=[0, 1], **options)
            return fn.flip(images, vertical=flips[0], horizontal=flips[1])

        return cropped(encoded), cropped(targets)

    def sample(self, source: ImagePairs, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same, made by Pillow: input and target, each (3, *crop_size) uint8.

        Raises:
            DataError: an image cannot be decoded.
            SampleErrors: see `inputs`.
        """
        from torchvision.transforms.v2 import functional as F

        images = _image(source.inputs, id), _image(source.targets, id)
        shapes = ((image.height, image.width) for image in images)
        (start,), (flips,) = self.inputs(source, Samples.one(id, epoch, *shapes))
        axes = [axis for axis, flips in enumerate(flips, 1) if flips]
        return tuple(F.crop(F.pil_to_tensor(image), *start, *self.crop_size).flip(axes) for image in images)


@dataclass(frozen=True, kw_only=True)
class TrainPairs(RandomFlips, Pairs):
    """A random window and random flips, vertical and horizontal, which depend on (seed, epoch, id) only."""

    def draws(self, ids: Ids, keys: Ids) -> Draws:
        """Draw as `Pairs` says."""
        numbers = uniforms(4, self.seed, keys, ids)
        return numbers[:, :2], self.flips(numbers[:, 2:])


@dataclass(frozen=True, kw_only=True)
class ValidationPairs(Pairs):
    """The centre of both images, without flips."""


@dataclass(frozen=True, kw_only=True)
class WholeImages(Pipeline[Files], DecoderSettings):
    """Whole images, without their targets, as predictions of networks that take any size need them.

    A batch has one image, since sizes differ.
    """

    image_files: ClassVar[int] = 1

    @property
    def outputs(self) -> tuple[str, ...]:
        """The name of images (3, H, W) uint8."""
        return ("inputs",)

    def files(self, source: Files) -> Sequence[Readable]:
        """Return the images."""
        return (source,)

    def inputs(self, source: Files, samples: Samples) -> Inputs:
        """Return nothing: the files suffice."""
        return ()

    def graph(self, source: Files, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode the images."""
        from nvidia.dali import fn

        return (fn.decoders.image(inputs[0], **self.decoder_options(device)),)

    def sample(self, source: Files, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return an image, decoded by Pillow."""
        from torchvision.transforms import functional as F

        from raydali.data.decode.pillow import decoded

        return (F.pil_to_tensor(decoded(source.read(id))),)


def windows(shapes: Integers, places: NDArray[np.float64], window: tuple[int, int]) -> Integers:
    """Return the starts of windows of one size: (N, 2), y before x.

    Args:
        shapes: (N, 2), height and width of each image.
        places: (N, 2), in [0, 1): between the first and the last position at which the window fits.
        window: its height and width; one that is larger than its image starts or ends outside it.
    """
    starts: Integers = np.floor(places * (shapes - np.array(window) + 1)).astype(np.int64)
    return starts


def _image(files: Files, id: int) -> "Image.Image":
    from raydali.data.decode.pillow import decoded

    try:
        return decoded(files.read(id))
    except Exception as error:
        raise DataError(f"{files.path(id)}: {error}") from error


def _size(shape: Integers) -> str:
    height, width = shape.tolist()
    return f"{width}x{height}"
