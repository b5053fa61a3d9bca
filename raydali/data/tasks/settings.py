"""The common settings of pipelines, and their checks."""

from dataclasses import dataclass
from typing import Any

from raydali.data.tasks.crops import Range
from raydali.data.tasks.pipeline import Device
from raydali.errors import UsageError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Mean and deviation of ImageNet's channels, in units of the full range."""
KINETICS_MEAN = (0.43216, 0.394666, 0.37645)
KINETICS_STD = (0.22803, 0.22145, 0.216989)
"""Those of Kinetics' channels, as torchvision's R(2+1)D weights expect them."""
KINETICS = {"mean": KINETICS_MEAN, "std": KINETICS_STD}


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """The settings of DALI's image decoders.

    Args:
        hw_decoder_load: share of the JPEGs that the GPU's hardware decoder decodes, among those that it supports; the
            others are decoded by CUDA kernels.
        largest_image: (height, width) for which decoding buffers are allocated at the start. For larger images, the GPU
            stalls while larger buffers are allocated.

    Raises:
        UsageError: a value is out of its range.
    """

    hw_decoder_load: float = 1.0
    largest_image: tuple[int, int] = (640, 640)

    def __post_init__(self) -> None:
        load, largest = self.hw_decoder_load, self.largest_image
        require(0 <= load <= 1, f"hw_decoder_load must be from 0 to 1, not {load}")
        require(min(largest) >= 0, f"largest_image must not be negative, is {largest}")

    def decoder_options(self, device: Device) -> dict[str, Any]:
        """Return the keyword arguments of `fn.decoders` on this device."""
        from raydali.data.tasks.dali_ops import decoder_options

        return decoder_options(device, self.hw_decoder_load, self.largest_image)


@dataclass(frozen=True, kw_only=True)
class SquareImages(DecoderSettings):
    """The settings of tasks with square output images.

    Args:
        image_size: height and width of the output, in pixels.

    Raises:
        UsageError: a value is out of its range.
    """

    image_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.image_size >= 1, f"image_size must be at least 1, not {self.image_size}")


def require(holds: bool, otherwise: str) -> None:
    """Raise UsageError with this message unless the condition holds."""
    if not holds:
        raise UsageError(otherwise)


def default_resize_size(image_size: int) -> int:
    """Return the shorter side, in pixels, of which validation crops the centre: 256 for 224, and in proportion."""
    return round(image_size * 256 / 224)


def require_resize(resize_size: int, image_size: int) -> None:
    """Check that a resized image is not smaller than the crop.

    Raises:
        UsageError: it is smaller; the message suggests a size.
    """
    require(
        resize_size >= image_size,
        f"resize_size {resize_size} is below image_size {image_size}, and the crop would need padding: "
        f"try {default_resize_size(image_size)}",
    )


def require_draws(seed: int, **probabilities: float) -> None:
    """Check the seed and the probabilities of random numbers.

    Raises:
        UsageError: a setting is out of its range.
    """
    require(0 <= seed < 1 << 63, f"seed must be from 0 to 2^63-1, not {seed}")
    for name, value in probabilities.items():
        require(0 <= value <= 1, f"{name} must be from 0 to 1, not {value}")


def require_crops(random_area: Range, random_aspect: Range) -> None:
    """Check the bounds of random crops.

    Raises:
        UsageError: bounds are invalid.
    """
    require(
        0 < random_area[0] <= min(1, random_area[1]) and random_area[1] < float("inf"),
        f"random_area must be (low, high) with 0 < low <= high and low at most 1, not {random_area}",
    )
    require(
        0 < random_aspect[0] <= random_aspect[1] < float("inf"),
        f"random_aspect must be (low, high) with 0 < low <= high, not {random_aspect}",
    )
