"""The settings that pipelines have in common, and their checks."""

from dataclasses import dataclass
from typing import Any

from raydali.data.tasks.pipeline import Device
from raydali.data.tasks.random_crops import Range
from raydali.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """The settings of DALI's image decoders.

    Args:
        hw_decoder_load: share of the JPEGs, of those that the GPU's hardware decoder supports, that it decodes; the
            rest is decoded on the GPU's other cores.
        largest_image: (height, width) for which decoding buffers are allocated at the start. Larger images are decoded
            too, but the GPU stalls while buffers for them are allocated.

    Raises:
        UsageError: a value is out of its range.
    """

    hw_decoder_load: float = 1.0
    largest_image: tuple[int, int] = (640, 640)

    def __post_init__(self) -> None:
        load, largest = self.hw_decoder_load, self.largest_image
        require(0 <= load <= 1, f"hw_decoder_load must be from 0 to 1, not {load}")
        require(min(largest) >= 0, f"largest_image must not be negative, is {largest}")

    def decoder(self, device: Device) -> dict[str, Any]:
        """Return the keyword arguments of `fn.decoders` on this device."""
        from raydali.data.tasks.dali_ops import decoder

        return decoder(device, self.hw_decoder_load, self.largest_image)


@dataclass(frozen=True, kw_only=True)
class SquareImages(DecoderSettings):
    """The settings of tasks whose images leave as squares.

    Args:
        image_size: height and width of the output, pixels.

    Raises:
        UsageError: a value is out of its range.
    """

    image_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.image_size >= 1, f"image_size must be at least 1, not {self.image_size}")


def require(holds: bool, otherwise: str) -> None:
    """Raise UsageError with these words where it does not hold."""
    if not holds:
        raise UsageError(otherwise)


def default_resize_size(image_size: int) -> int:
    """The shorter side, in pixels, of which validation crops the centre: 256 for 224, and in this ratio for others."""
    return round(image_size * 256 / 224)


def require_resize(resize_size: int, image_size: int) -> None:
    """Refuse a resized image that is smaller than the crop.

    Raises:
        UsageError: naming both sizes, and one that would do.
    """
    require(
        resize_size >= image_size,
        f"resize_size {resize_size} is below image_size {image_size}, and the crop would need padding: "
        f"try {default_resize_size(image_size)}",
    )


def require_draws(seed: int, **probabilities: float) -> None:
    """Refuse settings of random draws out of their ranges.

    Raises:
        UsageError: naming the setting and its value.
    """
    require(0 <= seed < 1 << 63, f"seed must be from 0 to 2^63-1, not {seed}")
    for name, value in probabilities.items():
        require(0 <= value <= 1, f"{name} must be from 0 to 1, not {value}")


def require_crops(random_area: Range, random_aspect: Range) -> None:
    """Refuse bounds of random crops that are none.

    Raises:
        UsageError: naming the setting and its value.
    """
    require(
        0 < random_area[0] <= random_area[1] <= 1,
        f"random_area must be (low, high) with 0 < low <= high <= 1, not {random_area}",
    )
    require(
        0 < random_aspect[0] <= random_aspect[1] < float("inf"),
        f"random_aspect must be (low, high) with 0 < low <= high, not {random_aspect}",
    )
