"""Rows of a table, measured round in turn: a machine that gets slower or faster meanwhile is so for all of them."""

import statistics
import sys
from collections.abc import Callable
from typing import Any

from raydali.bench.loader import measurement
from raydali.bench.loader.contenders import Task
from raydali.text import number


def measure_in_turn(
    rows: list[dict[str, Any]],
    task: Callable[[dict[str, Any]], Task],
    *,
    repeats: int,
    name: Callable[[dict[str, Any]], str],
    unit: str = "images",
    units_each: int = 1,
) -> None:
    """Measure every row so often; one that failed is not tried again.

    Args:
        rows: each with "gpus" and "error"; not measured where that is not null. They get "repeats" (the rates),
            "seconds" (measured, all repeats), "UNIT_per_second" (over all GPUs, the median), "low", "high" and, where
            one failed, "error".
        task: what a row's processes measure.
        name: a row in words.
        unit: what is counted.
        units_each: how many of them a sample has.
    """
    for row in rows:
        row |= {"repeats": [], "seconds": 0.0}
    for repeat in range(repeats):
        for row in rows:
            if row["error"]:
                continue
            try:
                delivered = measurement.measure(task(row), row["gpus"])
            except measurement.MeasurementFailed as error:
                row["error"] = str(error)
                continue
            row["repeats"].append(units_each * sum(each.images / each.seconds for each in delivered))
            row["seconds"] += max(each.seconds for each in delivered)
            which = f"{repeat + 1}/{repeats} {name(row)}"
            print(f"{which}: {number(row['repeats'][-1])} {unit}/s", file=sys.stderr, flush=True)
    for row in rows:
        rates = row["repeats"] if not row["error"] else []
        row[f"{unit}_per_second"] = statistics.median(rates) if rates else None
        row["low"], row["high"] = (min(rates), max(rates)) if rates else (None, None)
