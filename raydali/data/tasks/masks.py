"""Segmentation: a random square of an image and the same square of its mask, perhaps mirrored; classes never blend.

DALI reads the images. Pillow reads the masks, since DALI turns a palette into colours, which loses the classes of the
masks of VOC and DAVIS.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.reading import Cause
from raydali.data.tasks.pipeline import Device, Inputs
from raydali.data.tasks.restoration import Ids, RandomWindows, Windows, unfit
from raydali.data.tasks.settings import require
from raydali.errors import DataError

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode


@dataclass(frozen=True, kw_only=True)
class Masked(Windows):
    """A pipeline of squares of images and of their masks, whose 8-bit values are classes.

    Args:
        side: height and width of the squares, in pixels; no image may be smaller.
    """

    image_files: ClassVar[int] = 1
    flip_axes: ClassVar[int] = 1
    inputs_are: ClassVar[Cause] = "cpu decode"
    side: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.side >= 1, f"side must be at least 1 pixel, not {self.side}")

    @property
    def window(self) -> tuple[int, int]:
        """See `Windows`."""
        return self.side, self.side

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images (N, side, side, 3) and masks (N, side, side, 1), uint8."""
        return "images", "masks"

    def inputs(self, source: ImagePairs, ids: Ids, epochs: Ids) -> Inputs:
        """Return files of images, places (N, 2), flips (N, 1), and the masks."""
        masks = [self.mask(source, id) for id in ids.tolist()]
        return source.inputs.files(ids), *self.draws(ids, epochs), masks

    def mask(self, source: ImagePairs, id: int) -> NDArray[np.uint8]:
        """Return the classes (height, width, 1): of a palette its numbers, not its colours.

        Raises:
            OSError: it has colours.
        """
        from PIL import Image, ImageOps

        mask = ImageOps.exif_transpose(Image.open(BytesIO(source.targets.read(id))))
        if mask.mode not in ("L", "P"):
            raise OSError(f"{source.targets.path(id)} is of Pillow's mode {mask.mode}: save classes in 8 bits, L or P")
        return np.array(mask)[..., None]

    def unfit(self, shapes: Sequence[Ids], inputs: Inputs) -> NDArray[np.bool_]:
        """Return which samples (N,) have a mask of another size, or are smaller than the square."""
        return unfit(shapes[0], np.array([mask.shape[:2] for mask in inputs[2]]), self.window)

    def graph(self, source: ImagePairs, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode the squares of the images, cut those of the masks, and flip both."""
        from nvidia.dali import fn

        image, start, flip, mask = inputs
        where = {"start": start, "shape": [self.side, self.side], "axes": [0, 1]}
        image = fn.decoders.image_slice(image, **self.decoder_options(device), **where)
        mask = fn.reshape(fn.slice(mask, **where), layout="HWC")
        mask = mask.gpu() if device == "gpu" else mask
        return fn.flip(image, horizontal=flip[0]), fn.flip(mask, horizontal=flip[0])

    def sample(self, source: ImagePairs, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same by Pillow: image (3, side, side) and mask (1, side, side), uint8.

        Raises:
            DataError: the mask has another size, or the square does not fit.
        """
        import torch
        from torchvision.transforms.v2 import functional as F

        from raydali.data.tasks.pillow import decoded

        image, mask = decoded(source.inputs.read(id)), self.mask(source, id)
        (height, width), side = mask.shape[:2], self.side
        if image.size != (width, height) or min(image.size) < side:
            raise DataError(
                f"{image.width}x{image.height} pixels, its mask {width}x{height}, the crop {side}x{side}: give images "
                "and masks of one size, which is not below that of the crop"
            )
        *window, (flip,) = self.place(id, epoch, (height, width))
        cropped = [F.crop(each, *window) for each in (F.pil_to_tensor(image), torch.from_numpy(mask).permute(2, 0, 1))]
        return tuple(F.horizontal_flip(one) if flip else one for one in cropped)


@dataclass(frozen=True, kw_only=True)
class TrainMasks(RandomWindows, Masked):
    """A random square and a random horizontal flip, which depend on (seed, epoch, id) only."""


@dataclass(frozen=True, kw_only=True)
class ValidationMasks(Masked):
    """The square in the middle, not flipped."""
