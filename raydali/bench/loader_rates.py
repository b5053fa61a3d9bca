"""Measurement of loaders: new processes, one per GPU, that count the batches they take as fast as possible.

    start, first batches | barrier | warm-up | timed | barrier, end

Each measurement starts new processes, so that none inherits memory pools, page tables or CUDA's settings from another.
Repeats are interleaved over all rows of a table, so that a change in the machine's speed affects all rows equally.
"""

import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench.common import BenchOptions, Row, cell, names, ratio, spread
from raydali.bench.processes import CONTEXT, MeasurementError, run_ranks
from raydali.host import hardware
from raydali.output import devices
from raydali.text import duration, number, plural

if TYPE_CHECKING:
    from raydali.data.load.loader import Batch
    from raydali.data.stream.stream import Stream

Batches = Generator[Any, None, None]
Pixels = Literal["uint8", "float16", "float32"]
"""Format of a batch: images in 8 bits, or floats normalized by ImageNet's mean and deviation."""
PIXELS = ("uint8", "float32")
DATA_LOADERS = ("torchvision", "pyav")
"""Loaders that are torch's DataLoader: several processes make whole batches, which arrive in bursts. They are measured
on at most one GPU, because their processes share the host's cores for any number of GPUs."""
EPOCHS = 1 << 20
"""A number of epochs that takes longer than any measurement."""
WARM_UP = 0.2
"""Length of the warm-up, as a share of the timed segment's."""
USUAL_START = 6
"""Seconds from the start of a process to its first batch."""
START_SECONDS = 180
"""Limit for the start; on a cold machine the imports take half a minute."""
SLOWNESS = 10
"""The segments may last this number of times longer than requested, because they end with whole batches."""


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(BenchOptions):
    """Options of the benchmarks that measure loaders without training."""

    workers: int = 8
    """Worker processes of torch's DataLoader."""
    seconds: float = 5.0
    """Length of a measurement, after a warm-up of a fifth of it."""
    pixels: str = ",".join(PIXELS)
    """Formats that all loaders deliver: uint8 (8 bits), float32 (normalized). Ratios compare loaders that deliver the
    same format."""


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """The measurement of one process.

    Attributes:
        loader: the name of a loader.
        root: a folder of class folders of samples.
        batch_size: samples per batch.
        image_size: height and width of the output, pixels.
        threads: of DALI.
        workers: processes of torch's DataLoader.
        seconds: length of the timed segment, after a warm-up.
        pixels: the format that is delivered.
        gpu: whether batches go to GPU `rank`, or to the CPU's memory.
        rank, world_size: this process, and the number of processes that measure at once.
    """

    loader: str
    root: str
    batch_size: int
    image_size: int
    threads: int
    workers: int
    seconds: float
    pixels: Pixels = "uint8"
    gpu: bool = False
    rank: int = 0
    world_size: int = 1

    @property
    def device(self) -> str:
        """The device's name in torch."""
        return f"cuda:{self.rank}" if self.gpu else "cpu"

    @property
    def normalised(self) -> bool:
        """True if the loader delivers normalized floats."""
        return self.pixels != "uint8"

    @abstractmethod
    def batches(self) -> Batches:
        """Start the loader and generate its batches."""

    def use_all_queues(self) -> None:
        """Request all hardware queues of CUDA for raydali's loader, as in its jobs."""
        if self.gpu and self.loader == "raydali":
            hardware.set_max_connections()

    def endless(self, samples: int) -> "Stream":
        """Return EPOCHS epochs of samples, one batch per process and step."""
        from raydali.data.stream.stream import Stream

        together = self.batch_size * self.world_size
        return Stream(samples=samples, epochs=EPOCHS, batch_size=self.batch_size, global_batch_size=together, seed=0)

    def normalise(self, batches: "Iterable[Batch]", name: str) -> Batches:
        """Convert raydali's batches to the task's format, by `Normalized` on the device as jobs do."""
        import torch

        from raydali.training.models.normalized import Normalized

        model = Normalized(torch.nn.Identity()).to(self.device)
        for batch in batches:
            yield (model(batch[name]).to(getattr(torch, self.pixels)), batch["labels"]) if self.normalised else batch

    def data_loader(self, dataset: Any) -> Batches:
        """Generate a dataset's batches by torch's DataLoader, on the device."""
        from torch.utils.data import DataLoader, RandomSampler

        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=self.batch_size,
            # One long epoch, because the workers would be idle between epochs.
            sampler=RandomSampler(dataset, num_samples=len(dataset) * EPOCHS),
            num_workers=self.workers,
            multiprocessing_context="fork",  # the default of users; spawned processes would spawn
            persistent_workers=True,
            pin_memory=self.gpu,
            drop_last=True,
        )
        for batch in loader:
            yield [tensor.to(self.device, non_blocking=True) for tensor in batch]


@dataclass(frozen=True)
class Delivered:
    """Samples that a process counted in its timed segment, and the segment's length."""

    images: int
    seconds: float


def loader_rows(options: Any, counts: list[int]) -> list[Row]:
    """List the rows of a table: a loader, the format that it delivers, and the number of GPUs."""
    once = sorted({min(1, gpus) for gpus in counts})
    return [
        {"loader": name, "pixels": pixels, "gpus": gpus, "error": None}
        for name in names(options.loaders)
        for pixels in names(options.pixels)
        for gpus in (once if name in DATA_LOADERS else counts)
    ]


def measure_loaders(
    rows: list[Row],
    task: Callable[[Row], Task],
    options: LoadingOptions,
    rivals: Iterable[str],
    *,
    unit: str = "images",
    units_each: int = 1,
) -> None:
    """Measure every row `options.repeats` times; a row that failed is not measured again.

    Args:
        rows: each with "loader", "pixels", "gpus" and "error": None. They get "repeats" (the rates), "seconds"
            (measured, all repeats), "UNIT_per_second" (over all GPUs, the median), "low", "high", for each rival
            "to_RIVAL" (the ratio to its rate in the same format on as many GPUs), "scaling" (to itself on the fewest
            GPUs) and, if one failed, "error". Null: not measured.
        task: returns the task of a row's processes.
        options: the seconds of a repeat, and the number of repeats.
        rivals: the loaders that others are compared with.
        unit: the unit that is counted.
        units_each: units per sample.
    """
    for row in rows:
        row |= {"repeats": [], "seconds": 0.0}
    expected = options.repeats * len(rows) * (USUAL_START + (1 + WARM_UP) * options.seconds)
    what = f"{plural(options.repeats, 'repeat')} of {plural(len(rows), 'row')}"
    print(f"measuring {what}: about {duration(expected)}", file=sys.stderr, flush=True)
    for repeat in range(options.repeats):
        for row in rows:
            if row["error"]:
                continue
            try:
                measured = measure(task(row), row["gpus"])
            except MeasurementError as error:
                row["error"] = str(error)
                continue
            row["seconds"] += max(process.seconds for process in measured)
            row["repeats"].append(sum(units_each * process.images / process.seconds for process in measured))
            rate = f"{number(row['repeats'][-1])} {unit}/s"
            print(f"{repeat + 1}/{options.repeats} {row_name(row)}: {rate}", file=sys.stderr, flush=True)
    rate_name = f"{unit}_per_second"
    for row in rows:
        rates = row["repeats"] if not row["error"] else []
        row[rate_name] = statistics.median(rates) if rates else None
        row["low"], row["high"] = (min(rates), max(rates)) if rates else (None, None)
    _add_ratios(rows, rate_name, rivals)


def _add_ratios(rows: list[Row], rate: str, rivals: Iterable[str]) -> None:
    for row in rows:
        alike = [other for other in rows if other["pixels"] == row["pixels"] and other[rate]]
        for rival in rivals:
            gpus = min(1, row["gpus"]) if rival in DATA_LOADERS else row["gpus"]
            of_rival = [other[rate] for other in alike if (other["loader"], other["gpus"]) == (rival, gpus)]
            row[f"to_{rival}"] = ratio(row[rate], next(iter(of_rival), None))
        own = [other[rate] for other in alike if other["gpus"] and loader_name(other) == loader_name(row)]
        row["scaling"] = ratio(row[rate], next(iter(own), None)) if row["gpus"] else None


def loader_name(row: Row) -> str:
    """Return the name of a row's loader, with the format that it delivers unless this is 8 bits, and its decoders."""
    name = str(row["loader"]) if row["pixels"] == "uint8" else f"{row['loader']} + normalised"
    return f"{name}, {plural(row['decoders'], 'decoder')}" if row.get("decoders") else name


def row_name(row: Row) -> str:
    """Return the name of a row in messages."""
    return f"{loader_name(row)} on {devices(row['gpus'])}"


def loader_columns(unit: str, rivals: Iterable[str]) -> dict[str, Callable[[Row], str]]:
    """Return the columns of a table of loaders, as `present` takes them."""
    return {
        "loader": loader_name,
        "on": lambda row: devices(row["gpus"]),
        f"{unit}/s": cell(f"{unit}_per_second"),
        "lowest .. highest": spread,
        **{f"/ {rival}": cell(f"to_{rival}", ".2f") for rival in rivals},
        "scaling": cell("scaling", ".2f"),
    }


def loader_title(samples: str, settings: Mapping[str, Any]) -> str:
    """Return the title of a table of loaders."""
    return (
        f"{samples} to {settings['image_size']} x {settings['image_size']} pixels, batches of "
        f"{settings['batch_size']}, {settings['threads']} threads, {settings['workers']} DataLoader workers; in 8 bits "
        "unless noted"
    )


def measure(task: Task, gpus: int) -> list[Delivered]:
    """Measure one process per GPU, or one on the CPU if `gpus` is 0.

    Raises:
        MeasurementError: a process failed or timed out.
    """
    world_size = max(1, gpus)
    together = replace(task, gpu=gpus > 0, world_size=world_size), CONTEXT.Barrier(world_size)
    timeout = START_SECONDS + SLOWNESS * (1 + WARM_UP) * task.seconds
    try:
        return run_ranks(_deliver, together, world_size, timeout=timeout, remedy="lower --batch-size")
    except MeasurementError as error:
        raise MeasurementError(f"{task.loader}, {error}") from error


# Code of the processes that measure.


def _deliver(together: tuple[Task, Any], rank: int, _: int) -> Delivered:
    task, barrier = together
    task = replace(task, rank=rank)
    task.use_all_queues()
    at_once = task.workers if task.loader in DATA_LOADERS else 1
    with closing(task.batches()) as batches:
        _take(batches, 0, at_once)
        barrier.wait()
        _take(batches, WARM_UP * task.seconds, at_once)
        _synchronize(task)
        start = time.perf_counter()
        taken = _take(batches, task.seconds, at_once)
        _synchronize(task)
        seconds = time.perf_counter() - start
        barrier.wait()  # no process is torn down while others are timed
    return Delivered(taken * task.batch_size, seconds)


def _take(batches: Batches, seconds: float, at_once: int) -> int:
    """Take bursts of batches until the time is up, one burst at least; return the number of batches."""
    end = time.perf_counter() + seconds
    for bursts in count(1):
        for _ in range(at_once):
            next(batches)
        if time.perf_counter() >= end:
            return bursts * at_once
    raise AssertionError("endless")


def _synchronize(task: Task) -> None:
    if task.gpu:
        import torch

        torch.cuda.synchronize(task.device)
