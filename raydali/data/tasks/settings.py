"""The common settings of pipelines, and their checks."""

from dataclasses import dataclass
from typing import Any

from raydali.data.tasks.pipeline import Device
from raydali.errors import UsageError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's channels, in units of the full range."""
KINETICS_MEAN = (0.43216, 0.394666, 0.37645)
KINETICS_STD = (0.22803, 0.22145, 0.216989)
"""Mean and deviation of Kinetics' channels, as torchvision's R(2+1)D weights expect them."""
KINETICS = {"mean": KINETICS_MEAN, "std": KINETICS_STD}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that are checked when they are made; the parts of a pipeline's settings are subclasses.

    Raises:
        UsageError: a value is out of its range.
    """

    def __post_init__(self) -> None:
        """Check that values are in their ranges."""


@dataclass(frozen=True, kw_only=True)
class DecoderSettings(Settings):
    """The settings of DALI's image decoders.

    Args:
        hw_decoder_load: share of the JPEGs that the GPU's hardware decoder decodes, among those that it supports; the
            others are decoded by CUDA kernels.
        largest_image: (height, width) for which decoding buffers are allocated at the start. For larger images, the GPU
            stalls while larger buffers are allocated.
    """

    hw_decoder_load: float = 1.0
    largest_image: tuple[int, int] = (640, 640)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_share(hw_decoder_load=self.hw_decoder_load)
        require(min(self.largest_image) >= 0, f"largest_image must not be negative, is {self.largest_image}")

    def decoder_options(self, device: Device) -> dict[str, Any]:
        """Return the keyword arguments of `fn.decoders` on this device."""
        if device == "cpu":
            return {"device": "cpu"}
        return {
            "device": "mixed",
            "hw_decoder_load": self.hw_decoder_load,
            "preallocate_height_hint": self.largest_image[0],
            "preallocate_width_hint": self.largest_image[1],
        }


@dataclass(frozen=True, kw_only=True)
class SquareImages(Settings):
    """The settings of tasks with square output images.

    Args:
        image_size: height and width of the output, in pixels.
    """

    image_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.image_size >= 1, f"image_size must be at least 1, not {self.image_size}")


@dataclass(frozen=True, kw_only=True)
class ResizedImages(SquareImages):
    """The settings of tasks that resize images by their shorter side, and crop the result.

    Args:
        resize_size: length of the resized shorter side, at least image_size. None: 8/7 of image_size, like 256 for 224.
    """

    resize_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.shorter_side >= self.image_size,
            f"resize_size {self.shorter_side} is below image_size {self.image_size}, and the crop would need padding: "
            f"try {default_resize_size(self.image_size)}",
        )

    @property
    def shorter_side(self) -> int:
        """The length of the resized shorter side, in pixels."""
        return default_resize_size(self.image_size) if self.resize_size is None else self.resize_size


def default_resize_size(image_size: int) -> int:
    """Return the shorter side, in pixels, of which validation crops the centre: 256 for 224, and in proportion."""
    return round(image_size * 256 / 224)


def require(holds: bool, otherwise: str) -> None:
    """Raise UsageError with this message unless the condition holds."""
    if not holds:
        raise UsageError(otherwise)


def require_share(**shares: float) -> None:
    """Raise UsageError unless these settings, probabilities and the like, are from 0 to 1."""
    for name, value in shares.items():
        require(0 <= value <= 1, f"{name} must be from 0 to 1, not {value}")
