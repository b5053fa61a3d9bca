"""Image classification: a random resized crop and flip to train, a centre crop to validate.

    paths --> read --> shape --> window (python_function) --> decode the window --> resize --> flip, normalise
    draws, from (seed, epoch, id) --^                                                  ^-- flips

Only the window is decoded. On the CPU the decoded pixels are Pillow's, bit for bit (JPEG also in CMYK and YCCK,
PNG, WebP, BMP; EXIF orientation applied). Resized pixels differ from Pillow's by rounding, at most 1 of 255, but
for the outermost ring where the window is scaled down: there DALI's filter repeats the border, Pillow's cuts it off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from nvidia.dali import fn, types
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional as F

from raydali.data.augment import CROP_UNIFORMS, Range, crop_windows, draw_crops
from raydali.data.hashing import uniforms
from raydali.data.image_folder import ImageFolder
from raydali.data.pipeline import Device
from raydali.errors import UsageError

Ids = NDArray[np.int64]
Channels = tuple[float, float, float]
Rows = Sequence[NDArray[Any]]

_FLOATS = {"float16": types.DALIDataType.FLOAT16, "float32": types.DALIDataType.FLOAT}


@dataclass(frozen=True, kw_only=True)
class _Images:
    """What training and validation images have in common.

    Args:
        image_size: height and width of what comes out, pixels.
        mean, std: of each channel, in units of the full range.
        gpu_dtype: what the images are on a GPU; on the CPU they are float32.
        hw_decoder_load: share of JPEGs that the GPU's hardware decoder gets, the rest goes to its other cores.
        largest_image: (height, width) for which decoding buffers are set aside at the start; 0 for on demand.

    Raises:
        UsageError: a value out of its range.
    """

    image_size: int
    mean: Channels = (0.485, 0.456, 0.406)
    std: Channels = (0.229, 0.224, 0.225)
    gpu_dtype: Literal["float16", "float32"] = "float16"
    hw_decoder_load: float = 0.9
    largest_image: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        _require(self.image_size >= 1, f"image_size must be at least 1, not {self.image_size}")
        _require(
            len(self.mean) == 3 and all(0 <= m <= 1 for m in self.mean),
            f"mean must be three numbers in 0..1, not {self.mean}: divide by 255 if these are 8-bit values",
        )
        _require(
            len(self.std) == 3 and all(0 < s <= 1 for s in self.std),
            f"std must be three numbers above 0 and up to 1, not {self.std}: divide by 255 if these are 8-bit values",
        )
        _require(self.gpu_dtype in _FLOATS, f"gpu_dtype must be float16 or float32, not {self.gpu_dtype}")
        _require(0 <= self.hw_decoder_load <= 1, f"hw_decoder_load must lie in 0..1, not {self.hw_decoder_load}")
        _require(min(self.largest_image) >= 0, f"largest_image must not be negative, is {self.largest_image}")

    @property
    def outputs(self) -> tuple[str, ...]:
        """images (N, image_size, image_size, 3) and labels (N,) int64."""
        return "images", "labels"

    def _decoder(self, device: Device) -> dict[str, Any]:
        if device == "cpu":
            return {"device": "cpu"}
        return {
            "device": "mixed",
            "hw_decoder_load": self.hw_decoder_load,
            "preallocate_height_hint": self.largest_image[0],
            "preallocate_width_hint": self.largest_image[1],
        }

    def _leave(self, images: Any, labels: Any, device: Device, **options: Any) -> tuple[Any, Any]:
        images = fn.crop_mirror_normalize(
            images,
            mean=[255 * m for m in self.mean],
            std=[255 * s for s in self.std],
            dtype=_FLOATS[self.gpu_dtype if device == "gpu" else "float32"],
            output_layout="HWC",
            **options,
        )
        return images, labels.gpu() if device == "gpu" else labels

    def _tensors(self, image: Image.Image, source: ImageFolder, id: int) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = F.to_dtype(F.pil_to_tensor(image), torch.float32, scale=True)
        return F.normalize(pixels, list(self.mean), list(self.std)), torch.tensor(source.labels[id])


@dataclass(frozen=True, kw_only=True)
class TrainImages(_Images):
    """A random resized crop and a random flip, drawn from (seed, epoch, id): torchvision's, from other numbers.

    Args:
        seed: key of the random numbers, 0 or more.
        random_area: bounds of the crop's share of the image's area.
        random_aspect: bounds of the crop's width / height.
        flip_probability: of a horizontal flip.
    """

    seed: int
    random_area: Range = (0.08, 1.0)
    random_aspect: Range = (3 / 4, 4 / 3)
    flip_probability: float = 0.5

    def __post_init__(self) -> None:
        """Refuse values out of their ranges."""
        super().__post_init__()
        _require(0 <= self.seed < 1 << 63, f"seed must lie in 0..2^63-1, not {self.seed}")
        _require(
            0 < self.random_area[0] <= self.random_area[1] <= 1,
            f"random_area must be (low, high) with 0 < low <= high <= 1, not {self.random_area}",
        )
        _require(
            0 < self.random_aspect[0] <= self.random_aspect[1] < float("inf"),
            f"random_aspect must be (low, high) with 0 < low <= high, not {self.random_aspect}",
        )
        _require(
            0 <= self.flip_probability <= 1,
            f"flip_probability must lie in 0..1, not {self.flip_probability}",
        )

    def inputs(self, source: ImageFolder, ids: Ids, epochs: Ids) -> tuple[Rows | NDArray[Any], ...]:
        """Paths, draws (N, 11, 2) of the crops, flips (N,) int32, labels (N,) int64."""
        return source.encoded_paths(ids), *self._draws(ids, epochs), source.labels[ids]

    def graph(self, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Reads, decodes the windows only, resizes with antialiasing, flips and normalises."""
        paths, draws, flips, labels = inputs
        encoded = fn.io.file.read(paths)
        start, shape = _pairs(partial(_windows, self.random_aspect), fn.peek_image_shape(encoded), draws)
        images = fn.decoders.image_slice(encoded, start=start, shape=shape, axes=[0, 1], **self._decoder(device))
        images = fn.resize(images, size=(self.image_size, self.image_size))
        return self._leave(images, labels, device, mirror=flips)

    def sample(self, source: ImageFolder, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        """The same crop and flip by Pillow and torchvision: image (3, image_size, image_size) float32, label."""
        image = _opened(source.path(id))
        draws, flips = self._draws(np.array([id]), np.array([epoch]))
        shapes = np.array([[image.height, image.width]])
        (start,), (size,) = crop_windows(shapes, draws, self.random_aspect)
        image = F.resized_crop(image, *start.tolist(), *size.tolist(), size=[self.image_size, self.image_size])
        return self._tensors(F.horizontal_flip(image) if flips[0] else image, source, id)

    def _draws(self, ids: Ids, epochs: Ids) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        numbers = uniforms(CROP_UNIFORMS + 1, self.seed, epochs, ids)
        flips = (numbers[:, -1] < self.flip_probability).astype(np.int32)
        return draw_crops(numbers[:, :-1], self.random_area, self.random_aspect), flips


@dataclass(frozen=True, kw_only=True)
class ValidationImages(_Images):
    """The shorter side resized to `resize_size`, then the centre: torchvision's Resize and CenterCrop.

    Args:
        resize_size: at least image_size.
    """

    resize_size: int

    def __post_init__(self) -> None:
        """Refuse values out of their ranges."""
        super().__post_init__()
        _require(
            self.resize_size >= self.image_size,
            f"resize_size {self.resize_size} is below image_size {self.image_size}, and the crop would need padding: "
            f"try {round(self.image_size * 256 / 224)}",
        )

    def inputs(self, source: ImageFolder, ids: Ids, epochs: Ids) -> tuple[Rows | NDArray[Any], ...]:
        """Paths and labels (N,) int64; nothing is random."""
        return source.encoded_paths(ids), source.labels[ids]

    def graph(self, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Reads, decodes, resizes what the centre crop shows and nothing beside it, normalises."""
        paths, labels = inputs
        encoded = fn.io.file.read(paths)
        start, end = _pairs(partial(_centres, self.resize_size, self.image_size), fn.peek_image_shape(encoded))
        images = fn.decoders.image(encoded, **self._decoder(device))
        images = fn.resize(images, size=(self.image_size, self.image_size), roi_start=start, roi_end=end)
        return self._leave(images, labels, device)

    def sample(self, source: ImageFolder, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        """The same by Pillow and torchvision: image (3, image_size, image_size) float32, label."""
        image = F.resize(_opened(source.path(id)), [self.resize_size])
        return self._tensors(F.center_crop(image, [self.image_size]), source, id)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise UsageError(otherwise)


def _pairs(function: Callable[..., tuple[Rows, Rows]], *inputs: Any) -> Any:
    """Two rows of numbers a sample, computed by numpy for the whole batch at once."""
    return fn.python_function(*inputs, function=function, num_outputs=2, batch_processing=True)


def _windows(random_aspect: Range, shapes: Rows, draws: Rows) -> tuple[Rows, Rows]:
    starts, sizes = crop_windows(np.stack(shapes)[:, :2], np.stack(draws), random_aspect)
    return list(starts.astype(np.int32)), list(sizes.astype(np.int32))


def _centres(resize_size: int, image_size: int, shapes: Rows) -> tuple[Rows, Rows]:
    """Where the centre crops of the resized images lie in the originals: start and end, in pixels, not rounded."""
    originals = np.stack(shapes)[:, :2]
    resized = resize_size * originals // originals.min(1, keepdims=True)
    tops = np.rint((resized - image_size) / 2)
    scale = originals / resized
    return list((tops * scale).astype(np.float32)), list(((tops + image_size) * scale).astype(np.float32))


def _opened(path: str) -> Image.Image:
    with Image.open(path) as file:
        image = ImageOps.exif_transpose(file)
    if image.mode.startswith("I;16"):
        # convert("RGB") would cut 16-bit values off at 255; DALI scales them.
        image = Image.fromarray(np.rint(np.asarray(image) / 257).astype(np.uint8))
    return image.convert("RGB")
