"""A published table, measured again: images resized to 640x640 on the CPU and on 1, 2 and 4 GPUs.

The published figures are the seconds of one pass over 21,453 images of PASCAL VOC, with batches of 32, 8 threads or 8
DataLoader workers, PyTorch 1.10 and DALI 1.6 on a Xeon Gold 5120 with Tesla V100s. Ours are of other images. Both
sides do the same work: they decode the whole image and resize it, and deliver 8 bits, not normalized.

The ratios compare hardware: a GPU with processes on a CPU. An A100 or newer decodes JPEGs in a hardware engine, which
a V100 lacks, so our ratios and the published ones are of different generations, not of different loaders.
"""

from typing import Any

from raydali.bench.common.results import cell

PUBLISHED_IMAGES = 21453
PUBLISHED_SECONDS = {0: 101.06, 1: 6.24, 2: 3.07, 4: 1.57}
"""By number of GPUs; 0 is PyTorch on the CPU."""
SETTINGS: dict[str, Any] = {"image_size": 640, "batch_size": 32, "threads": 8, "workers": 8}
"""Options of `raydali bench loader` that the table fixes."""
PYTORCH, DALI = "torchvision-resize", "raydali-resize"
COLUMNS = {
    "seconds": cell("pass_seconds", ",.2f"),
    "published": cell("published_seconds", ",.2f"),
    "published / PyTorch": cell("published_to_torchvision", ".2f"),
    "published scaling": cell("published_scaling", ".2f"),
}
"""Further columns of the table."""


def wanted(counts: list[int]) -> list[tuple[str, str, int]]:
    """List the rows, all in 8 bits: PyTorch on the CPU, DALI on each number of GPUs."""
    return [(PYTORCH, "uint8", 0), *((DALI, "uint8", gpus) for gpus in counts)]


def complete(result: dict[str, Any]) -> None:
    """Add the published figures to each row, and the time of the same work at the row's rate.

    "pass_seconds" is the duration of a pass over the published number of images at the row's rate. "published_seconds",
    "published_to_torchvision" and "published_scaling" are null if they were not published.
    """
    result["settings"]["pass_images"] = PUBLISHED_IMAGES
    for row in result["rows"]:
        rate, gpus = row["images_per_second"], row["gpus"]
        seconds = PUBLISHED_SECONDS.get(gpus) if gpus or row["loader"] == PYTORCH else None
        row["pass_seconds"] = PUBLISHED_IMAGES / rate if rate else None
        row["published_seconds"] = seconds
        row["published_to_torchvision"] = PUBLISHED_SECONDS[0] / seconds if seconds else None
        row["published_scaling"] = PUBLISHED_SECONDS[1] / seconds if seconds and gpus else None
