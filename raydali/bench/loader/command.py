"""`raydali bench loader`: how fast loaders deliver batches when nobody uses them.

    raydali bench loader --data ~/imagenet/train --gpus 1,2,4 --json loaders.json --plot loaders.png
    raydali bench loader --loaders raydali,native,torchvision --threads 2 --workers 2 --batch-size 64

All loaders deliver the same: images in 8 bits, which is what the ratios of a first row are of, and again normalised
floats. The second command is the guard for the CPU: its ratios to native and to torchvision in 8 bits are to stay
above 1.0 and 1.3. Every figure comes from processes of its own, and the repeats go round all loaders in turn, so that
a machine that gets slower or faster meanwhile is so for all of them. Files are read many times over: out of the page
cache, unless --data is larger than memory. How fast a disk is, the figures do not say.
"""

import os
import statistics
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raydali.bench.common import shared_options
from raydali.bench.common.results import NOT_INSTALLED, contender, require_measured, spread
from raydali.output import JsonFile, devices, machine, show, write_json
from raydali.text import number

if TYPE_CHECKING:
    from raydali.bench.loader.contenders import Task
    from raydali.data.sources.image_folder import ImageFolder

CHOICE = ("raydali", "native", "torchvision", "spdl", "synthetic")
POSITIVE = ("make", "batch_size", "image_size", "threads", "workers", "repeats")
PIXELS = ("uint8", "float32")
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
    pixels: str = ",".join(PIXELS)
    """All loaders deliver this: uint8 is images in 8 bits, float32 normalised floats.
    Ratios are of loaders that deliver the same."""
    json: JsonFile = None
    plot: str | None = None
    """File for a picture of them, PNG."""
    seed_table: bool = False
    """Measure a published table again instead: images resized to 640x640, batches of 32, 8 threads, 8 workers."""


def main(options: LoaderBench) -> dict[str, Any]:
    """Measure, show, write.

    Returns:
        What --json writes: {"command", "machine", "settings", "rows"}. A row: {"loader", "pixels" ("uint8" or
        "float32"), "gpus" (0: the CPU), "images_per_second" (over all GPUs, the median), "low", "high", "seconds"
        (measured, all repeats), "repeats" (each one's rate), "to_native" (at as many GPUs), "to_torchvision" (both
        delivering the same), "scaling" (to itself at the fewest GPUs), "error"}. What was not measured is null.

    Raises:
        UsageError: an option that cannot be met; before anything is measured.
        CommandFailed: a loader could not be measured; after the others' results were shown and written.
    """
    from raydali.bench.common.synthetic_images import photographs
    from raydali.bench.loader import published_baseline
    from raydali.bench.loader.plot import plot
    from raydali.data.sources.image_folder import ImageFolder

    if options.seed_table:
        options = replace(options, **published_baseline.SETTINGS)
    shared_options.check(options, positive=POSITIVE, loaders=CHOICE)
    shared_options.chosen("pixels", options.pixels, PIXELS)
    counts = shared_options.gpu_counts(options.gpus)
    given = ImageFolder.scan(options.data) if options.data is not None else None
    shared_options.check_images(options, len(given) if given else options.make, max(counts))
    with photographs(options.data, options.make) as root:
        wanted = published_baseline.wanted(counts) if options.seed_table else _wanted(options, counts)
        result = _measure(options, given or ImageFolder.scan(root), wanted)
    if options.seed_table:
        published_baseline.complete(result)
        published_baseline.show_table(result)
    else:
        _show_table(result)
    if options.json:
        write_json(result, options.json)
    if options.plot:
        plot(result, options.plot)
    require_measured(result["rows"], _name)
    return result


def _wanted(options: LoaderBench, counts: list[int]) -> list[tuple[str, str, int]]:
    """The rows: a loader, what it delivers, and on how many GPUs."""
    once = sorted({min(1, gpus) for gpus in counts})
    forms = shared_options.names(options.pixels)
    return [
        (name, pixels, gpus)
        for name in shared_options.names(options.loaders)
        for pixels in (forms[:1] if name == "synthetic" else forms)
        for gpus in (once if name in ONE_PROCESS else counts)
    ]


def _measure(options: LoaderBench, source: "ImageFolder", wanted: list[tuple[str, str, int]]) -> dict[str, Any]:
    from raydali.bench.loader.contenders import LOADERS
    from raydali.bench.loader.interleaved import measure_in_turn

    rows: list[dict[str, Any]] = [
        {"loader": name, "pixels": pixels, "gpus": gpus, "error": None if LOADERS[name].is_installed else NOT_INSTALLED}
        for name, pixels, gpus in wanted
    ]
    measure_in_turn(rows, lambda row: _task(options, source.root, row), repeats=options.repeats, name=_name)
    _add_ratios(rows)
    settings = asdict(options) | _images(source)
    return {"command": "bench loader", "machine": machine(), "settings": settings, "rows": rows}


def _task(options: LoaderBench, root: str, row: dict[str, Any]) -> "Task":
    from raydali.bench.loader.contenders import Task

    return Task(
        loader=row["loader"],
        root=root,
        batch_size=options.batch_size,
        image_size=options.image_size,
        threads=options.threads,
        workers=options.workers,
        seconds=options.seconds,
        pixels=row["pixels"],
    )


def _name(row: dict[str, Any]) -> str:
    return f"{contender(row)} on {devices(row['gpus'])}"


def _images(source: "ImageFolder") -> dict[str, int]:
    """How many images, and how many bytes one has on average: of a thousand, since looking at all may take long."""
    import numpy as np

    ids = np.linspace(0, len(source) - 1, min(1000, len(source))).astype(np.int64)
    sizes = [os.path.getsize(source.path(id)) for id in ids.tolist()]
    return {"images": len(source), "bytes_per_image": round(statistics.mean(sizes))}


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    rates = {(row["loader"], row["pixels"], row["gpus"]): row["images_per_second"] for row in rows}

    def ratio(row: dict[str, Any], other: float | None) -> float | None:
        return row["images_per_second"] / other if row["images_per_second"] and other else None

    for row in rows:
        pixels, gpus = row["pixels"], row["gpus"]
        torchvision = [rates.get((name, pixels, count)) for count in (min(1, gpus), 0) for name in ONE_PROCESS]
        own = [rates[key] for key in sorted(rates) if key[:2] == (row["loader"], pixels) and key[2] and rates[key]]
        row["to_native"] = ratio(row, rates.get(("native", pixels, gpus)))
        row["to_torchvision"] = ratio(row, next(filter(None, torchvision), None))
        row["scaling"] = ratio(row, own[0] if own and gpus else None)


def _show_table(result: dict[str, Any]) -> None:
    settings = result["settings"]
    show(
        f"{settings['images']:,} images of {settings['bytes_per_image'] / 1000:,.0f} KB to {settings['image_size']} x "
        f"{settings['image_size']} pixels, batches of {settings['batch_size']}, {settings['threads']} threads, "
        f"{settings['workers']} DataLoader workers; in 8 bits where it is not said otherwise",
        ("loader", "on", "images/s", "lowest .. highest", "/ native", "/ torchvision", "scaling"),
        [
            (
                contender(row),
                devices(row["gpus"]),
                number(row["images_per_second"]),
                spread(row),
                *(number(row[name], ".2f") for name in ("to_native", "to_torchvision", "scaling")),
            )
            for row in result["rows"]
        ],
    )
