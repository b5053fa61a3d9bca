"""What both benchmarks are asked for, read and refused alike."""

from collections.abc import Sequence
from typing import Any

from raydali.bench.results import devices, gpu_names, require_writable
from raydali.errors import UsageError


def names(listed: str) -> list[str]:
    """The names in a list with commas, each once."""
    return list(dict.fromkeys(name.strip() for name in listed.split(",") if name.strip()))


def check(options: Any, *, positive: Sequence[str], loaders: Sequence[str]) -> None:
    """Refuse options out of their ranges.

    Args:
        options: with `loaders`, `data` and `json` among its fields, and perhaps `plot`.
        positive: fields that must be at least 1, where they are given.
        loaders: what --loaders may name.

    Raises:
        UsageError: naming the option, its value and the remedy.
    """
    for name in positive:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if not names(options.loaders):
        raise UsageError(f"--loaders names none: choose from {','.join(loaders)}")
    for name in names(options.loaders):
        if name not in loaders:
            raise UsageError(f"no loader is called {name!r}: --loaders takes {','.join(loaders)}")
    if options.data is not None and "://" in options.data:
        raise UsageError(f"--data {options.data}: the other loaders read local folders alone: give a copy on a disk")
    require_writable("--json", options.json)
    require_writable("--plot", getattr(options, "plot", None))


def gpu_counts(gpus: str | None) -> list[int]:
    """The numbers of GPUs to measure on, ascending; 0 is the CPU alone.

    Raises:
        UsageError: not such numbers, or more than this machine has.
    """
    available = len(gpu_names())
    if gpus is None:
        return [min(1, available)]
    try:
        counts = sorted({int(part) for part in gpus.split(",")})
    except ValueError:
        counts = [-1]
    if counts[0] < 0:
        raise UsageError(f"--gpus must be numbers of GPUs such as 1,2,4, not {gpus!r}: 0 is the CPU alone")
    if counts[-1] > available:
        there = f"has {devices(available)}" if available else "has no GPU that CUDA can use"
        raise UsageError(f"--gpus {gpus}: this machine {there}: ask for {available} at most (0 is the CPU alone)")
    return counts


def check_images(options: Any, images: int, counts: Sequence[int]) -> None:
    """Refuse fewer images than a batch on each GPU takes.

    Raises:
        UsageError: naming both figures.
    """
    needed = options.batch_size * max(1, *counts)
    if images < needed:
        where, remedy = (f" in {options.data}", "") if options.data else ("", f", or --make {needed} of them")
        raise UsageError(
            f"{images} images{where} are fewer than the {needed} that batches of {options.batch_size} on "
            f"{devices(max(counts))} take at once: lower --batch-size{remedy}"
        )
