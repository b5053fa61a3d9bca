"""Settings that pipelines have in common, and what they must be."""

from raydali.data.tasks.random_crops import Range
from raydali.errors import UsageError


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


def require_decoding(hw_decoder_load: float, largest_image: tuple[int, int]) -> None:
    """Refuse settings of DALI's decoders out of their ranges.

    Raises:
        UsageError: naming the setting and its value.
    """
    require(0 <= hw_decoder_load <= 1, f"hw_decoder_load must lie in 0..1, not {hw_decoder_load}")
    require(min(largest_image) >= 0, f"largest_image must not be negative, is {largest_image}")


def require_draws(seed: int, **probabilities: float) -> None:
    """Refuse settings of random draws out of their ranges.

    Raises:
        UsageError: naming the setting and its value.
    """
    require(0 <= seed < 1 << 63, f"seed must lie in 0..2^63-1, not {seed}")
    for name, value in probabilities.items():
        require(0 <= value <= 1, f"{name} must lie in 0..1, not {value}")


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
