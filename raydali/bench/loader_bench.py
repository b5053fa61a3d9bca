"""`raydali bench loader`: how fast loaders deliver batches when nobody uses them.

    raydali bench loader --data ~/imagenet/train --gpus 1,2,4 --json loaders.json --plot loaders.png
    raydali bench loader --loaders raydali,native,torchvision --threads 2 --workers 2 --batch-size 64

The second is the guard for the CPU: its ratios to native and to torchvision are to stay above 1.0 and 1.9. Every
figure comes from processes of its own, and the repeats go round all loaders in turn, so that a machine that gets
slower or faster meanwhile is so for all of them.
"""

import os
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raydali.bench import asked
from raydali.bench.results import NOT_INSTALLED, require_measured, spread
from raydali.command_output import JsonFile, devices, machine, number, show, write_json

if TYPE_CHECKING:
    from raydali.bench.loaders import Task
    from raydali.data.image_folder import ImageFolder

CHOICE = ("raydali", "native", "torchvision", "spdl", "synthetic")
POSITIVE = ("make", "batch_size", "image_size", "threads", "workers", "repeats")
ONE_PROCESS = ("torchvision", "torchvision-resize")
"""Measured on at most one GPU: its processes share the host's cores, however many GPUs there are."""


@dataclass(frozen=True, kw_only=True)
class LoaderBench:
    """How fast loaders deliver batches when nobody uses them: a table with ratios."""

    data: str | None = None
    """Folder of class folders of images. Default: made ones."""
    make: int = 2048
    """Without --data: how many images to make, noise like photographs, 130 KB each, in a temporary folder."""
    gpus: str | None = None
    """Numbers of GPUs, such as 1,2,4; 0 is the CPU alone. Default: 1, or 0 on a machine with no GPU."""
    batch_size: int = 256
    """Images of a batch, for each GPU."""
    image_size: int = 224
    """Side of the square images that are delivered, in pixels."""
    threads: int = 8
    """Of DALI and of SPDL, for each GPU."""
    workers: int = 8
    """Processes of torch's DataLoader."""
    seconds: float = 5.0
    """How long to measure each time, after a warm-up of a fifth of it."""
    repeats: int = 3
    """How often to measure; the median is reported, and the lowest and the highest."""
    loaders: str = ",".join(CHOICE)
    """Which to measure. spdl is left out where it is not installed."""
    json: JsonFile = None
    plot: str | None = None
    """File for a picture of them, PNG."""
    seed_table: bool = False
    """Measure a published table again instead: images resized to 640x640, batches of 32, 8 threads, 8 workers."""


def main(options: LoaderBench) -> dict[str, Any]:
    """Measure, show, write.

    Returns:
        What --json writes: {"command", "machine", "settings", "rows"}. A row: {"loader", "gpus" (0: the CPU),
        "images_per_second" (over all GPUs, the median), "low", "high", "seconds" (measured, all repeats), "repeats"
        (each one's rate), "to_native" (at as many GPUs), "to_torchvision", "scaling" (to itself at the fewest GPUs),
        "error"}. What was not measured is null.

    Raises:
        UsageError: an option that cannot be met; before anything is measured.
        CommandFailed: a loader could not be measured; after the others' results were shown and written.
    """
    from raydali.bench import table_640
    from raydali.bench.loader_plot import plot
    from raydali.bench.photographs import photographs
    from raydali.data.image_folder import ImageFolder

    if options.seed_table:
        options = table_640.settings(options)
    asked.check(options, positive=POSITIVE, loaders=CHOICE)
    counts = asked.gpu_counts(options.gpus)
    given = ImageFolder.scan(options.data) if options.data is not None else None
    asked.check_images(options, len(given) if given else options.make, max(counts))
    with photographs(options.data, options.make) as root:
        pairs = table_640.pairs(counts) if options.seed_table else _pairs(options, counts)
        result = _measure(options, given or ImageFolder.scan(root), pairs)
    if options.seed_table:
        table_640.complete(result)
        table_640.show_table(result)
    else:
        _show_table(result)
    if options.json:
        write_json(result, options.json)
    if options.plot:
        plot(result, options.plot)
    require_measured(result["rows"], _name)
    return result


def _pairs(options: LoaderBench, counts: list[int]) -> list[tuple[str, int]]:
    once = sorted({min(1, gpus) for gpus in counts})
    return [(name, gpus) for name in asked.names(options.loaders) for gpus in (once if name in ONE_PROCESS else counts)]


def _measure(options: LoaderBench, source: "ImageFolder", pairs: list[tuple[str, int]]) -> dict[str, Any]:
    from raydali.bench.in_turn import measure_in_turn
    from raydali.bench.loaders import LOADERS

    rows: list[dict[str, Any]] = [
        {"loader": loader, "gpus": gpus, "error": None if LOADERS[loader].is_installed else NOT_INSTALLED}
        for loader, gpus in pairs
    ]
    measure_in_turn(rows, lambda row: _task(options, source.root, row["loader"]), repeats=options.repeats, name=_name)
    _add_ratios(rows)
    settings = asdict(options) | _images(source)
    return {"command": "bench loader", "machine": machine(), "settings": settings, "rows": rows}


def _task(options: LoaderBench, root: str, loader: str) -> "Task":
    from raydali.bench.loaders import Task

    return Task(
        loader=loader,
        root=root,
        batch_size=options.batch_size,
        image_size=options.image_size,
        threads=options.threads,
        workers=options.workers,
        seconds=options.seconds,
    )


def _name(row: dict[str, Any]) -> str:
    return f"{row['loader']} on {devices(row['gpus'])}"


def _images(source: "ImageFolder") -> dict[str, int]:
    """How many images, and how many bytes one has on average: of a thousand, since looking at all may take long."""
    import numpy as np

    ids = np.linspace(0, len(source) - 1, min(1000, len(source))).astype(np.int64)
    sizes = [os.path.getsize(source.path(id)) for id in ids.tolist()]
    return {"images": len(source), "bytes_per_image": round(statistics.mean(sizes))}


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    rates = {(row["loader"], row["gpus"]): row["images_per_second"] for row in rows}

    def ratio(row: dict[str, Any], other: float | None) -> float | None:
        return row["images_per_second"] / other if row["images_per_second"] and other else None

    for row in rows:
        gpus = row["gpus"]
        torchvision = [rates.get((name, count)) for count in (min(1, gpus), 0) for name in ONE_PROCESS]
        own = [rate for (name, count), rate in sorted(rates.items()) if name == row["loader"] and count and rate]
        row["to_native"] = ratio(row, rates.get(("native", gpus)))
        row["to_torchvision"] = ratio(row, next(filter(None, torchvision), None))
        row["scaling"] = ratio(row, own[0] if own and gpus else None)


def _show_table(result: dict[str, Any]) -> None:
    settings = result["settings"]
    show(
        f"{settings['images']:,} images of {settings['bytes_per_image'] / 1000:,.0f} KB to {settings['image_size']} x "
        f"{settings['image_size']} pixels, batches of {settings['batch_size']}, {settings['threads']} threads, "
        f"{settings['workers']} DataLoader workers",
        ("loader", "on", "images/s", "lowest .. highest", "/ native", "/ torchvision", "scaling"),
        [
            (
                row["loader"],
                devices(row["gpus"]),
                number(row["images_per_second"]),
                spread(row),
                *(number(row[name], ".2f") for name in ("to_native", "to_torchvision", "scaling")),
            )
            for row in result["rows"]
        ],
    )
