"""`raydali bench goodput`: the time to a step while a random rank is killed every N seconds.

    raydali bench goodput --json goodput.json --plot goodput.png
    raydali bench goodput --contenders undisturbed,raydali-in-place --steps 500 --kill-every 10

    undisturbed         raydali, and no rank is killed
    ray                 plain Ray Train: DDP, all ranks restart from the newest checkpoint
    raydali-restart     raydali with --no-replace: all ranks restart from the newest checkpoint
    raydali-in-place    raydali: the others train on, and the rank is replaced
    torchft             torchft on Ray Train's replica groups: the same, without the samples of the killed rank

All train the same network with the same steps on the built-in digits, on CPUs, each on a Ray cluster of its own on this
machine. Kills come at the same times after the first step, and hit ranks that have finished a step: a time at which
all ranks are starting is left out.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from raydali.bench.common.options import check, names
from raydali.bench.common.results import NOT_INSTALLED, cell, collect, measured_row, result_of
from raydali.bench.goodput.metrics import METRICS, goodput
from raydali.bench.goodput.options import CHOICE, GoodputOptions
from raydali.errors import UsageError
from raydali.host.interrupts import raise_on_signals
from raydali.output import JsonFile
from raydali.text import number, plural

MAX_WORKERS = 16


@dataclass(frozen=True, kw_only=True)
class GoodputBench(GoodputOptions):
    """Kill a random rank every some seconds, and measure the time to a step, for several ways to survive it."""

    json: JsonFile = None
    plot: str | None = None
    """PNG file to draw the steps over time to."""


def main(options: GoodputBench) -> dict[str, Any]:
    """Run each contender, print the table in Markdown and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"contender", "error", the metrics of
        metrics.py, "goodput": the ratio of its steps per second to the undisturbed run's}. Null: not measured.

    Raises:
        UsageError: an option is invalid; before anything is started.
        CommandError: a contender failed; after the other results were shown and written.
    """
    from raydali.bench.goodput.plot import plot

    check(options, contenders=CHOICE)
    if options.workers > MAX_WORKERS:
        raise UsageError(f"--workers must be from 1 to {MAX_WORKERS}, not {options.workers}")
    raise_on_signals()
    result = result_of("bench goodput", asdict(options), [])
    return collect(result, _measured(options), options, name=_name, line=_line, show_table=_show_table, plot=plot)


def _measured(options: GoodputBench) -> Iterator[dict[str, Any]]:
    from raydali.bench.goodput.contenders import measure  # imports Ray and torch: seconds

    done: list[dict[str, Any]] = []
    for contender in names(options.contenders):
        row: dict[str, Any] = {"contender": contender}
        if contender == "torchft" and importlib.util.find_spec("torchft") is None:
            done.append(row | {"error": NOT_INSTALLED} | dict.fromkeys(METRICS))
        else:
            done.append(measured_row(row, _name(row), partial(measure, contender, options), METRICS))
        yield done[-1] | {"goodput": goodput(done[-1], done)}


def _name(row: dict[str, Any]) -> str:
    return CHOICE[row["contender"]]


def _line(row: dict[str, Any]) -> str:
    return f"{_name(row)}: step {row['reached']} after {row['seconds']:.1f} s, {plural(len(row['kills']), 'kill')}"


def _show_table(result: dict[str, Any]) -> None:
    """Print the table in Markdown, for documents."""
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "": _name,
        "Seconds": cell("seconds", ",.1f"),
        "Steps": cell("reached"),
        "Goodput": cell("goodput", ".2f"),
        "Kills": lambda row: "-" if row["kills"] is None else str(len(row["kills"])),
        "Longest pause after a kill": lambda row: number(row["pause_seconds"], ".1f", " s"),
        "Steps done again": cell("steps_done_again"),
        "Samples lost": cell("lost"),
        "Samples repeated": cell("repeated"),
        "Step": lambda row: number(row["step_seconds"] and 1000 * row["step_seconds"], ".0f", " ms"),
    }
    lines = [list(columns), ["---"] * len(columns)]
    for row in result["rows"]:
        missing = "not installed (`pip install torchft`)" if row["error"] == NOT_INSTALLED else "failed"
        cells = [column(row) for column in columns.values()]
        lines.append([cells[0], missing, *["-"] * (len(cells) - 2)] if row["error"] else cells)
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
