"""The options, checks, rows, tables and JSON files that all benchmarks share."""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from raydali.bench.processes import MeasurementError
from raydali.errors import CommandError, UsageError
from raydali.extras import require_dali
from raydali.output import JsonFile, devices, gpu_names, machine, require_writable, show, write_json
from raydali.text import error_line, number

Row = dict[str, Any]
_Task = TypeVar("_Task")
MAKE_FOR_GPU, MAKE_FOR_CPU = 16384, 512
"""Default number of synthetic images to train on."""
OF_DALI = ("raydali", "dali", "native", "reader")
"""Loaders that need NVIDIA DALI."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Options of all benchmarks of loading and training."""

    data: str | None = None
    """Folder of class folders of images. Default: synthetic images."""
    gpus: str | None = None
    """Numbers of GPUs to measure on, such as 1,2,4; 0 means the CPU. Default: 1, or 0 on a machine with no GPU."""
    batch_size: int = 256
    """Images per batch and GPU."""
    image_size: int = 224
    """Height and width of the images that are delivered, in pixels."""
    threads: int = 8
    """DALI threads per GPU."""
    repeats: int = 3
    """Number of measurements; the median is reported, with the lowest and the highest."""
    json: JsonFile = None


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(BenchOptions):
    """Options of the benchmarks that train."""

    make: int | None = None
    """Without --data: number of synthetic images, 130 KB each, in a temporary folder. Default: 16384, or 512 for the
    CPU."""
    steps: int = 60
    """Steps of each measured segment."""
    timeout: float = 300.0
    """Maximum seconds per row, start-up and compilation included."""


def names(listed: str) -> list[str]:
    """Split a comma-separated list of names; each is kept once."""
    return list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))


def integers(listed: str) -> list[int]:
    """Parse a comma-separated list of integers, sorted and without repeats; empty if one is invalid."""
    try:
        return sorted({int(part) for part in listed.split(",")})
    except ValueError:
        return []


def check(options: Any, **choices: Collection[str]) -> None:
    """Check the common options of benchmarks, if this benchmark has them.

    Args:
        options: a dataclass; every number in it must be positive, except --gpus.
        choices: for each field, the names that its comma-separated list may have.

    Raises:
        UsageError: an option is invalid; the message has the option, its value and a remedy.
    """
    for field in fields(options):
        name, value = field.name.replace("_", "-"), getattr(options, field.name)
        if type(value) is int and value < 1 and name != "gpus":
            raise UsageError(f"--{name} must be at least 1, not {value}")
        if type(value) is float and not 0 < value < float("inf"):
            raise UsageError(f"--{name} must be above 0, not {value}")
    for name, choice in choices.items():
        found = names(getattr(options, name))
        if not found:
            raise UsageError(f"--{name} is empty: choose from {','.join(choice)}")
        for each in found:
            if each not in choice:
                raise UsageError(f"--{name} {each} is unknown: choose from {','.join(choice)}")
            if each in OF_DALI:
                require_dali(f"--{name} {each}", f"leave {each} out of --{name}")
    data = getattr(options, "data", None)
    if data is not None and "://" in data:
        raise UsageError(f"--data {data} is not local, as the other loaders need it: give a copy on a disk")
    require_writable("--json", options.json)


def gpu_counts(gpus: str | None) -> list[int]:
    """Parse --gpus: numbers of GPUs, ascending; 0 means the CPU.

    Raises:
        UsageError: the list is malformed, or exceeds the GPUs of this machine.
    """
    available = len(gpu_names())
    if gpus is None:
        return [min(1, available)]
    counts = integers(gpus)
    if not counts or counts[0] < 0:
        raise UsageError(f"--gpus must be numbers of GPUs such as 1,2,4, or 0 for the CPU, not {gpus!r}")
    if counts[-1] > available:
        there = f"has {devices(available)}" if available else "has no GPU that CUDA can use"
        raise UsageError(f"--gpus {gpus}: this machine {there}: give at most {available}, or 0 for the CPU")
    return counts


def check_samples(options: BenchOptions, count: int, batches: int, on: str, unit: str = "images") -> None:
    """Check that there are enough samples for one batch of each GPU or process.

    Raises:
        UsageError: there are too few.
    """
    needed = options.batch_size * max(1, batches)
    if count < needed:
        where = f" in {options.data}" if options.data else ""
        remedy = "" if options.data else f", or --make {needed} of them" if unit == "images" else ", or --make more"
        raise UsageError(
            f"batches of {options.batch_size} on {on} need {needed} {unit}, not {count}{where}: lower "
            f"--batch-size{remedy}"
        )


def check_classifier(model: str) -> None:
    """Check the name of a model; imports torchvision, which takes seconds, only for uncommon ones.

    Raises:
        UsageError: there is no such model.
    """
    if model not in ("resnet50", "resnet18", "digits"):
        from raydali.train.models.classification import check_model

        check_model(model)


def training_settings(options: TrainingOptions, gpus: int, processes: int = 1) -> dict[str, Any]:
    """Complete the options by the number of images: "make" (null with --data) and "images".

    Raises:
        UsageError: the data is missing, or has too few images for a batch of each GPU or process.
    """
    from raydali.data.sources.labeled import LabeledFiles

    make = options.make or (MAKE_FOR_GPU if gpus else MAKE_FOR_CPU)
    images = len(LabeledFiles.scan(options.data)) if options.data is not None else make
    check_samples(options, images, max(gpus, processes), devices(gpus))
    return asdict(options) | {"make": None if options.data else make, "images": images}


def task_of(kind: type[_Task], options: Any, **others: Any) -> _Task:
    """Make a dataclass from `others` and from the options with the names of its other fields."""
    shared = {field.name: getattr(options, field.name) for field in fields(kind) if hasattr(options, field.name)}  # type: ignore[arg-type]
    return kind(**shared | others)


def measure_rows(
    rows: Iterable[Row],
    measure: Callable[[Row], Any],
    metrics: Mapping[str, Callable[[Any], Any]],
    name: Callable[[Row], str],
    finish: Callable[[list[Row]], Any],
) -> None:
    """Measure one row after the other, print the rate of each, and finish with those that were measured.

    Args:
        rows: what to measure. A row gets "error" and its metrics.
        measure: measures a row. If it raises MeasurementError, the row has this error, and its metrics are null.
        metrics: functions of what `measure` returned; the first one is the rate in images per second that is printed.
        name: returns the name of a row.
        finish: shows and writes the rows; called after an interruption too.

    Raises:
        CommandError: a row could not be measured.
    """
    done: list[Row] = []
    try:
        for row in rows:
            print(f"{name(row)} ...", file=sys.stderr, flush=True)
            try:
                measured = measure(row)
                row |= {"error": None} | {name: metric(measured) for name, metric in metrics.items()}
                outcome = f"{number(row[next(iter(metrics))])} images/s"
            except MeasurementError as error:
                row |= {"error": str(error)} | dict.fromkeys(metrics)
                outcome = f"failed: {error_line(error)}"
            print(f"{name(row)}: {outcome}", flush=True)
            done.append(row)
    finally:
        if done:
            finish(done)
    require_measured(done, name)


def require_measured(rows: Iterable[Row], name: Callable[[Row], str]) -> None:
    """Raise CommandError with the errors of the rows that could not be measured."""
    failed = [f"{name(row)}: {row['error']}" for row in rows if row["error"] is not None]
    if failed:
        raise CommandError("\n".join(failed))


def ratio(value: float | None, other: float | None) -> float | None:
    """Divide two rates; None if one of them was not measured."""
    return value / other if value and other else None


def result_of(command: str, settings: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return what --json writes."""
    return {"command": command, "machine": machine(), "settings": settings, "rows": rows}


def present(
    result: dict[str, Any], options: Any, title: str, columns: Mapping[str, Callable[[Row], str]]
) -> dict[str, Any]:
    """Print the rows as a table, and write the result to --json; return it. The function of a column formats a row."""
    show(title, list(columns), [[column(row) for column in columns.values()] for row in result["rows"]])
    if options.json:
        write_json(result, options.json)
    return result


def cell(key: str, form: str = ",.0f") -> Callable[[Row], str]:
    """Return a function that formats a value of a row."""
    return lambda row: number(row[key], form)


def spread(row: Row, low: str = "low", high: str = "high", form: str = ",.0f") -> str:
    """Format the lowest and the highest of a row's repeats, or the reason why there are none."""
    if row["error"]:
        return "failed: see below"
    return f"{number(row[low], form)} .. {number(row[high], form)}"
