"""What several benchmarks are asked for, read and refused alike."""

from collections.abc import Collection, Iterable
from typing import Any

from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.output import devices, gpu_names, require_writable

MAKE_FOR_GPU, MAKE_FOR_CPU = 16384, 512
"""Images to train on, where --make says nothing."""


def names(listed: str) -> list[str]:
    """The names in a list with commas, each once."""
    return list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))


def chosen(option: str, listed: str, choice: Collection[str]) -> list[str]:
    """The names that an option lists, each once.

    Raises:
        UsageError: it lists none, or another than there are.
    """
    found = names(listed)
    if not found:
        raise UsageError(f"--{option} names none: choose from {','.join(choice)}")
    for name in found:
        if name not in choice:
            raise UsageError(f"--{option} {listed}: {name!r} is none of them: choose from {','.join(choice)}")
    return found


def integers(listed: str) -> list[int]:
    """The numbers in a list with commas, ascending, each once; none where not all are numbers."""
    try:
        return sorted({int(part) for part in listed.split(",")})
    except ValueError:
        return []


def check_positive(options: Any, fields: Iterable[str]) -> None:
    """Refuse fields below 1, where they are given.

    Raises:
        UsageError: naming the option and its value.
    """
    for field in fields:
        value = getattr(options, field)
        if value is not None and value < 1:
            raise UsageError(f"--{field.replace('_', '-')} must be at least 1, not {value}")


def check(options: Any, *, positive: Iterable[str], loaders: Collection[str]) -> None:
    """Refuse options out of their ranges.

    Args:
        options: with `loaders`, `data` and `json` among its fields, and perhaps `seconds`, `timeout` and `plot`.
        positive: fields that must be at least 1, where they are given.
        loaders: what --loaders may name.

    Raises:
        UsageError: naming the option, its value and the remedy.
    """
    check_positive(options, positive)
    for field in ("seconds", "timeout"):
        value = getattr(options, field, 1.0)
        if not 0 < value < float("inf"):
            raise UsageError(f"--{field} must be above 0, not {value}")
    chosen("loaders", options.loaders, loaders)
    if options.data is not None and "://" in options.data:
        raise UsageError(f"--data {options.data}: the other loaders read local folders alone: give a copy on a disk")
    require_writable("--json", options.json)
    require_writable("--plot", getattr(options, "plot", None))
    if getattr(options, "plot", None):
        require_extra("plot", "matplotlib", "pictures of benchmarks")


def gpu_counts(gpus: str | None) -> list[int]:
    """The numbers of GPUs to measure on, ascending; 0 is the CPU alone.

    Raises:
        UsageError: not such numbers, or more than this machine has.
    """
    available = len(gpu_names())
    if gpus is None:
        return [min(1, available)]
    counts = integers(gpus)
    if not counts or counts[0] < 0:
        raise UsageError(f"--gpus must be numbers of GPUs such as 1,2,4, not {gpus!r}: 0 is the CPU alone")
    if counts[-1] > available:
        there = f"has {devices(available)}" if available else "has no GPU that CUDA can use"
        raise UsageError(f"--gpus {gpus}: this machine {there}: ask for {available} at most (0 is the CPU alone)")
    return counts


def to_make(options: Any, gpus: int) -> int:
    """How many images to make for training on so many GPUs: as asked for, or by default."""
    return int(options.make or (MAKE_FOR_GPU if gpus else MAKE_FOR_CPU))


def check_images(options: Any, images: int, gpus: int, processes: int = 1) -> None:
    """Refuse fewer images than the batches of all GPUs, or of all processes without any, take.

    Raises:
        UsageError: naming both figures.
    """
    needed = options.batch_size * max(gpus, processes)
    if images < needed:
        where, remedy = (f" in {options.data}", "") if options.data else ("", f", or --make {needed} of them")
        raise UsageError(
            f"{images} images{where} are fewer than the {needed} that batches of {options.batch_size} on "
            f"{devices(gpus)} take at once: lower --batch-size{remedy}"
        )
