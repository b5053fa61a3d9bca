"""`raydali bench loader`: how fast loaders deliver batches if nothing uses them.

    raydali bench loader --data ~/imagenet/train --gpus 1,2,4 --json loaders.json
    raydali bench loader --loaders raydali,native,torchvision --threads 2 --workers 2 --batch-size 64

All loaders deliver the same formats: images in 8 bits, and in separate rows normalized floats. The second command is a
regression check for the CPU: its ratios to native and to torchvision in 8 bits must stay above 1.0 and 1.3. Files are
read many times, from the page cache unless --data is larger than memory, so the rates do not include the time of a
disk.

`--seed-table` measures a published table again: images resized to 640x640 on the CPU and on 1, 2 and 4 GPUs. The
published figures are the seconds of one pass over 21,453 images of PASCAL VOC, with batches of 32, 8 threads or 8
DataLoader workers, PyTorch 1.10 and DALI 1.6 on a Xeon Gold 5120 with Tesla V100s. Ours are of other images. Both
sides do the same work: they decode the whole image and resize it, and deliver 8 bits, not normalized. The ratios
compare hardware: a GPU with processes on a CPU. An A100 or newer decodes JPEGs in a hardware engine, which a V100
lacks, so our ratios and the published ones are of different generations, not of different loaders.
"""

import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydali.bench import common
from raydali.bench.common import (
    PIXELS,
    LoadingOptions,
    cell,
    contender_name,
    present,
    ratio,
    require_measured,
    result_of,
    show_rows,
    spread,
    task_of,
)
from raydali.output import devices

if TYPE_CHECKING:
    from raydali.data.sources.labeled import LabeledFiles

FEW, SECONDS_FOR_FEW = 1000, 120.0
"""Images of a trial, and the default of --limit for it."""
CHOICE = ("raydali", "native", "torchvision", "synthetic")
ONE_PROCESS = ("torchvision", "torchvision-resize")
"""Loaders that are measured on at most one GPU: their processes share the host's cores for any number of GPUs."""

PUBLISHED_IMAGES = 21453
PUBLISHED_SECONDS = {0: 101.06, 1: 6.24, 2: 3.07, 4: 1.57}
"""By number of GPUs; 0 is PyTorch on the CPU."""
PUBLISHED_SETTINGS: dict[str, Any] = {"image_size": 640, "batch_size": 32, "threads": 8, "workers": 8}
"""Options that the published table fixes."""
PUBLISHED_PYTORCH, PUBLISHED_DALI = "torchvision-resize", "raydali-resize"
PUBLISHED_COLUMNS = {
    "seconds": cell("pass_seconds", ",.2f"),
    "published": cell("published_seconds", ",.2f"),
    "published / PyTorch": cell("published_to_torchvision", ".2f"),
    "published scaling": cell("published_scaling", ".2f"),
}
"""Further columns of its table."""


@dataclass(frozen=True, kw_only=True)
class LoaderBench(LoadingOptions):
    """Measure how fast loaders deliver batches when nothing uses them, as a table with ratios."""

    make: int = 2048
    """Without --data: number of synthetic images, 130 KB each, in a temporary folder."""
    threads: int = 8
    """Threads of DALI, per GPU."""
    loaders: str = ",".join(CHOICE)
    """Loaders to measure."""
    limit: float | None = None
    """Maximum seconds of all repeats but the first; one that would end later is left out. Default: 120 with fewer than
    1000 images, else none."""
    seed_table: bool = False
    """Reproduce a published table instead: images resized to 640x640, batches of 32, 8 threads, 8 workers."""


def main(options: LoaderBench) -> dict[str, Any]:
    """Measure the loaders, show the table and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"loader", "pixels" ("uint8" or
        "float32"), "gpus" (0: the CPU), "images_per_second" (over all GPUs, the median), "low", "high", "seconds"
        (measured, all repeats), "repeats" (each one's rate), "to_native" (on as many GPUs), "to_torchvision" (both
        delivering the same), "scaling" (to itself on the fewest GPUs), "error"}. Null: not measured.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a loader could not be measured; after the other results were shown and written.
    """
    from raydali.bench.synthetic_images import synthetic_images
    from raydali.data.sources.labeled import LabeledFiles

    if options.seed_table:
        options = replace(options, **PUBLISHED_SETTINGS, loaders="raydali,torchvision")
    common.check(options, loaders=CHOICE, pixels=PIXELS)
    counts = common.gpu_counts(options.gpus)
    given = LabeledFiles.scan(options.data) if options.data is not None else None
    common.check_samples(options, len(given) if given else options.make, max(counts), devices(max(counts)))
    with synthetic_images(options.data, options.make) as root:
        result = _measure(options, given or LabeledFiles.scan(root), _wanted(options, counts))
    if options.seed_table:
        _add_published(result)
    present(result, options, _show_table)
    require_measured(result["rows"], _name)
    return result


def _wanted(options: LoaderBench, counts: list[int]) -> list[tuple[str, str, int]]:
    """List the rows: a loader, the format that it delivers, and the number of GPUs."""
    if options.seed_table:
        return [(PUBLISHED_PYTORCH, "uint8", 0), *((PUBLISHED_DALI, "uint8", gpus) for gpus in counts)]
    once = sorted({min(1, gpus) for gpus in counts})
    formats = common.names(options.pixels)
    return [
        (name, pixels, gpus)
        for name in common.names(options.loaders)
        for pixels in (formats[:1] if name == "synthetic" else formats)
        for gpus in (once if name in ONE_PROCESS else counts)
    ]


def _measure(options: LoaderBench, source: "LabeledFiles", wanted: list[tuple[str, str, int]]) -> dict[str, Any]:
    from raydali.bench.image_loaders import Task
    from raydali.bench.loader_rates import interleaved

    def task(row: dict[str, Any]) -> Task:
        return task_of(Task, options, loader=row["loader"], root=source.root, pixels=row["pixels"])

    rows: list[dict[str, Any]] = [
        {"loader": name, "pixels": pixels, "gpus": gpus, "error": None} for name, pixels, gpus in wanted
    ]
    limit = options.limit or (SECONDS_FOR_FEW if len(source) < FEW else math.inf)
    interleaved(rows, task, repeats=options.repeats, name=_name, limit=limit)
    _add_ratios(rows)
    return result_of("bench loader", asdict(options) | _images(source), rows)


def _name(row: dict[str, Any]) -> str:
    return f"{contender_name(row)} on {devices(row['gpus'])}"


def _images(source: "LabeledFiles") -> dict[str, int]:
    """Count the images, and estimate their mean size from a thousand, since all of them may take long."""
    import numpy as np

    ids = np.linspace(0, len(source) - 1, min(1000, len(source))).astype(np.int64)
    sizes = [Path(source.path(id)).stat().st_size for id in ids.tolist()]
    return {"images": len(source), "bytes_per_image": round(statistics.mean(sizes))}


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    rates = {(row["loader"], row["pixels"], row["gpus"]): row["images_per_second"] for row in rows}
    for row in rows:
        pixels, gpus = row["pixels"], row["gpus"]
        torchvision = [rates.get((name, pixels, count)) for count in (min(1, gpus), 0) for name in ONE_PROCESS]
        own = [rates[key] for key in sorted(rates) if key[:2] == (row["loader"], pixels) and key[2] and rates[key]]
        rate = row["images_per_second"]
        row["to_native"] = ratio(rate, rates.get(("native", pixels, gpus)))
        row["to_torchvision"] = ratio(rate, next(filter(None, torchvision), None))
        row["scaling"] = ratio(rate, own[0] if own and gpus else None)


def _add_published(result: dict[str, Any]) -> None:
    """Add the published figures to each row, and the time of the same work at the row's rate.

    "pass_seconds" is the duration of a pass over the published number of images at the row's rate. "published_seconds",
    "published_to_torchvision" and "published_scaling" are null if they were not published.
    """
    result["settings"]["pass_images"] = PUBLISHED_IMAGES
    for row in result["rows"]:
        rate, gpus = row["images_per_second"], row["gpus"]
        seconds = PUBLISHED_SECONDS.get(gpus) if gpus or row["loader"] == PUBLISHED_PYTORCH else None
        row["pass_seconds"] = PUBLISHED_IMAGES / rate if rate else None
        row["published_seconds"] = seconds
        row["published_to_torchvision"] = PUBLISHED_SECONDS[0] / seconds if seconds else None
        row["published_scaling"] = PUBLISHED_SECONDS[1] / seconds if seconds and gpus else None


def _show_table(result: dict[str, Any]) -> None:
    settings = result["settings"]
    columns = {
        "loader": contender_name,
        "on": lambda row: devices(row["gpus"]),
        "images/s": cell("images_per_second"),
        "lowest .. highest": spread,
        "/ native": cell("to_native", ".2f"),
        "/ torchvision": cell("to_torchvision", ".2f"),
        "scaling": cell("scaling", ".2f"),
    }
    show_rows(
        f"{settings['images']:,} images of {settings['bytes_per_image'] / 1000:,.0f} KB to {settings['image_size']} x "
        f"{settings['image_size']} pixels, batches of {settings['batch_size']}, {settings['threads']} threads, "
        f"{settings['workers']} DataLoader workers; in 8 bits unless noted"
        + (f"; seconds are of {PUBLISHED_IMAGES:,} images" if settings["seed_table"] else ""),
        columns | PUBLISHED_COLUMNS if settings["seed_table"] else columns,
        result["rows"],
    )
