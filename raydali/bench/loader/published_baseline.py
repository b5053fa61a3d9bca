"""A published table, measured again: loading images resized to 640x640 on the CPU and on 1, 2 and 4 GPUs.

Its figures are the seconds of one pass over 21,453 images of PASCAL VOC, batches of 32, 8 threads or 8 DataLoader
workers, PyTorch 1.10 and DALI 1.6 on a Xeon Gold 5120 with Tesla V100s. Ours are of other images. Both sides do the
same work: decode the whole image and resize it; what they deliver has 8 bits and is not normalised.

The ratios compare hardware: a GPU beside processes on a CPU. An A100 or newer decodes JPEGs by an engine of its own,
which a V100 has not, so that our ratios and the published ones are of different generations, not of different loaders.
"""

from typing import Any

from raydali.bench.common.results import spread
from raydali.output import devices, show
from raydali.text import number

PUBLISHED_IMAGES = 21453
PUBLISHED_SECONDS = {0: 101.06, 1: 6.24, 2: 3.07, 4: 1.57}
"""By the number of GPUs; 0: PyTorch on the CPU."""
SETTINGS: dict[str, Any] = {
    "image_size": 640,
    "batch_size": 32,
    "threads": 8,
    "workers": 8,
    "loaders": "raydali,torchvision",
}
"""Options of `raydali bench loader` that the table fixes."""
PYTORCH, DALI = "torchvision-resize", "raydali-resize"
TITLES = {PYTORCH: "PyTorch", DALI: "DALI (raydali)"}


def wanted(counts: list[int]) -> list[tuple[str, str, int]]:
    """What is measured, all in 8 bits: PyTorch on the CPU, DALI on each number of GPUs."""
    return [(PYTORCH, "uint8", 0), *((DALI, "uint8", gpus) for gpus in counts)]


def complete(result: dict[str, Any]) -> None:
    """Add to each row "pass_seconds", of one pass over the published number of images at the row's rate, without
    its start, and what was published of the same: "published_seconds", "published_to_torchvision",
    "published_scaling"; null where nothing was."""
    result["settings"]["pass_images"] = PUBLISHED_IMAGES
    for row in result["rows"]:
        rate, gpus = row["images_per_second"], row["gpus"]
        seconds = PUBLISHED_SECONDS.get(gpus) if gpus or row["loader"] == PYTORCH else None
        row["pass_seconds"] = PUBLISHED_IMAGES / rate if rate else None
        row["published_seconds"] = seconds
        row["published_to_torchvision"] = PUBLISHED_SECONDS[0] / seconds if seconds else None
        row["published_scaling"] = PUBLISHED_SECONDS[1] / seconds if seconds and gpus else None


def show_table(result: dict[str, Any]) -> None:
    """Print ours beside what was published."""
    chosen = result["settings"]
    show(
        f"{chosen['images']:,} images of {chosen['bytes_per_image'] / 1000:,.0f} KB resized to 640 x 640 pixels, "
        f"batches of 32, 8 threads or workers; seconds are of {PUBLISHED_IMAGES:,} images",
        (
            "loader",
            "on",
            "images/s",
            "lowest .. highest",
            "seconds",
            "published",
            "/ PyTorch",
            "published",
            "/ 1 GPU",
            "published",
        ),
        [
            (
                TITLES[row["loader"]],
                devices(row["gpus"]),
                number(row["images_per_second"]),
                spread(row),
                number(row["pass_seconds"], ",.2f"),
                number(row["published_seconds"], ",.2f"),
                number(row["to_torchvision"], ".2f"),
                number(row["published_to_torchvision"], ".2f"),
                number(row["scaling"], ".2f"),
                number(row["published_scaling"], ".2f"),
            )
            for row in result["rows"]
        ],
    )
