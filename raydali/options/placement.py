"""This file has the options that place workers, of jobs and of commands on trained runs, and the bounds of options."""

import operator
from dataclasses import dataclass
from functools import cached_property
from inspect import get_annotations
from typing import Annotated, NamedTuple

import tyro

from raydali.errors import UsageError


class Bounds(NamedTuple):
    """The range of a numeric option, in its annotation. An option that was not given (None) passes."""

    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None


_COMPARISONS = ("at least", operator.ge), ("above", operator.gt), ("below", operator.lt), ("at most", operator.le)
"""The words and the operator of each of these bounds."""
AT_LEAST_0, AT_LEAST_1 = Bounds(least=0), Bounds(least=1)


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """The number of workers, and what each one gets."""

    workers: str | None = None
    """Number of workers, or MIN:MAX to grow and shrink with the cluster. Default: one per GPU, or 2 without GPUs."""
    cpus_per_worker: Annotated[int | None, AT_LEAST_1] = None
    """CPU cores per worker. Default: the cores per GPU of a node, or an equal share of the cores."""
    gpu: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Require GPUs. Default: use GPUs if the cluster has any, else CPUs."""
    no_gpu: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Use CPUs, even if there are GPUs."""

    def __post_init__(self) -> None:
        _ = self.worker_range
        if self.gpu and self.no_gpu:
            raise UsageError("--gpu and --no-gpu exclude each other: give at most one of them")
        for name, bounds in _bounds_of(type(self)).items():
            require(self, name, **bounds._asdict())

    @cached_property
    def worker_range(self) -> tuple[int, int] | None:
        """(minimum, maximum) of workers, or None without such an option.

        Raises:
            UsageError: no such range.
        """
        if self.workers is None:
            return None
        try:
            low, _, high = self.workers.partition(":")
            minimum, maximum = int(low), int(high or low)
        except ValueError:
            raise UsageError(f"--workers must be a number or MIN:MAX, such as 4 or 2:8, not {self.workers}") from None
        if not 1 <= minimum <= maximum:
            raise UsageError(f"--workers must be at least 1, and MIN at most MAX, not {self.workers}")
        return minimum, maximum


def _bounds_of(options: type) -> dict[str, Bounds]:
    """Return the bounds of options by name; a class that declares an option again need not repeat its bounds."""
    declared = [pair for base in reversed(options.__mro__) for pair in get_annotations(base).items()]
    return {
        name: bounds
        for name, annotation in declared
        for bounds in getattr(annotation, "__metadata__", ())
        if isinstance(bounds, Bounds)
    }


def require(options: object, name: str, **bounds: float | None) -> None:
    """Refuse a numeric option outside its `Bounds`; one that was not given (None) passes.

    Raises:
        UsageError: naming the option, its value and the range.
    """
    value = getattr(options, name)
    pairs = zip(_COMPARISONS, Bounds(**bounds), strict=True)
    limits = [(word, holds, bound) for (word, holds), bound in pairs if bound is not None]
    if value is not None and not all(holds(value, bound) for _, holds, bound in limits):
        wanted = " and ".join(f"{word} {bound}" for word, _, bound in limits)
        raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, not {value}")
