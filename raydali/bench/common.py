"""The options, checks, rows, tables and JSON files that all benchmarks share."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from raydali.errors import CommandError, UsageError
from raydali.extras import require_dali
from raydali.output import JsonFile, devices, gpu_names, machine, require_writable, show, write_json
from raydali.text import number

Row = dict[str, Any]
_Task = TypeVar("_Task")
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


_READ_BUCKETS = {"raydali", "synthetic"}


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
        values = names(getattr(options, name))
        if not values:
            raise UsageError(f"--{name} is empty: choose from {','.join(choice)}")
        for value in values:
            if value not in choice:
                raise UsageError(f"--{name} {value} is unknown: choose from {','.join(choice)}")
            if value in OF_DALI:
                require_dali(f"--{name} {value}", f"leave {value} out of --{name}")
    data = getattr(options, "data", None)
    if data is not None and "://" in data and not _READ_BUCKETS.issuperset(names(getattr(options, "loaders", ""))):
        remedy = "give a copy on a disk, or --loaders raydali,synthetic"
        raise UsageError(f"--data {data} is not local, as the other loaders need it: {remedy}")
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


def task_of(kind: type[_Task], options: Any, **others: Any) -> _Task:
    """Make a dataclass from `others` and from the options with the names of its other fields."""
    shared = {field.name: getattr(options, field.name) for field in fields(kind) if hasattr(options, field.name)}  # type: ignore[arg-type]
    return kind(**shared | others)


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
