"""What rows of a benchmark's table have in common, and what could not be measured."""

from collections.abc import Callable, Iterable
from typing import Any

from raydali.errors import CommandFailed
from raydali.text import number

NOT_INSTALLED = "not installed"
"""The error of a row that is no failure."""


def contender(row: dict[str, Any]) -> str:
    """A loader and what it delivers, where that is not images in 8 bits: a row's "loader" and "pixels"."""
    return row["loader"] if row["pixels"] == "uint8" else f"{row['loader']} + normalised"


def spread(row: dict[str, Any]) -> str:
    """The lowest and the highest of a row's repeats, "low" and "high"; or why there are none."""
    if row["error"]:
        return NOT_INSTALLED if row["error"] == NOT_INSTALLED else "failed: see below"
    return f"{number(row['low'])} .. {number(row['high'])}"


def require_measured(rows: Iterable[dict[str, Any]], name: Callable[[dict[str, Any]], str]) -> None:
    """Say at the end which rows could not be measured.

    Args:
        rows: with "error", null where there was none.
        name: a row in words.

    Raises:
        CommandFailed: there are such rows; those that are not installed are none.
    """
    failed = [f"{name(row)}: {row['error']}" for row in rows if row["error"] not in (None, NOT_INSTALLED)]
    if failed:
        raise CommandFailed("\n".join(failed))
