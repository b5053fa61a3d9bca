"""Results of a benchmark: rows of a table, the files of --json and --plot, rows that could not be measured."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from raydali.bench.common.processes import MeasurementError
from raydali.errors import CommandError
from raydali.output import machine, show, write_json
from raydali.text import error_line, number

NOT_INSTALLED = "not installed"
"""The error of a row that does not count as a failure."""
Row = dict[str, Any]
Show = Callable[[dict[str, Any]], None]
Plot = Callable[[dict[str, Any], str], None]
_Task = TypeVar("_Task")


def result_of(command: str, settings: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return what --json writes."""
    return {"command": command, "machine": machine(), "settings": settings, "rows": rows}


def present(result: dict[str, Any], options: Any, show_table: Show, plot: Plot | None = None) -> None:
    """Print the table, and write the files that the options name."""
    show_table(result)
    if options.json:
        write_json(result, options.json)
    if plot and options.plot:
        plot(result, options.plot)


def collect(
    result: dict[str, Any],
    rows: Iterable[Row],
    options: Any,
    *,
    name: Callable[[Row], str],
    line: Callable[[Row], str],
    show_table: Show,
    plot: Plot,
) -> dict[str, Any]:
    """Add rows to the result as they are measured, and write --json after each; present it at the end or on a failure.

    Args:
        result: what is written, all but the rows.
        rows: measures while it is iterated.
        options: the command's.
        name: names a row.
        line: describes a row that was measured.
        show_table: prints the result.
        plot: draws it, for --plot.

    Raises:
        CommandError: a row could not be measured; after the others were presented.
    """
    try:
        for row in rows:
            result["rows"].append(row)
            error = row["error"]
            print(f"{name(row)}: failed: {error_line(error)}" if error else line(row), flush=True)
            if options.json:
                write_json(result, options.json)
    finally:
        if result["rows"]:
            present(result, options, show_table, plot)
    require_measured(result["rows"], name)
    return result


def measured_row(row: Row, name: str, measure: Callable[[], Any], metrics: Mapping[str, Callable[[Any], Any]]) -> Row:
    """Complete a row by "error" and by metrics, functions of what `measure` returns; if it fails, all of them null."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        measured = measure()
    except MeasurementError as error:
        return row | {"error": str(error)} | dict.fromkeys(metrics)
    return row | {"error": None} | evaluate(metrics, measured)


def evaluate(metrics: Mapping[str, Callable[[Any], Any]], measured: Any) -> Row:
    """Apply every metric to what was measured."""
    return {name: metric(measured) for name, metric in metrics.items()}


def task_of(kind: type[_Task], options: Any, **others: Any) -> _Task:
    """Make a dataclass of `others`, and of the options that have the names of its remaining fields."""
    shared = {field.name: getattr(options, field.name) for field in fields(kind) if hasattr(options, field.name)}  # type: ignore[arg-type]
    return kind(**shared | others)


def ratio(value: float | None, other: float | None) -> float | None:
    """Divide two rates; None if one of them was not measured."""
    return value / other if value and other else None


def contender_name(row: Row) -> str:
    """Name a row's loader, and the format that it delivers if that is not 8 bits."""
    return str(row["loader"]) if row["pixels"] == "uint8" else f"{row['loader']} + normalised"


def spread(row: Row, low: str = "low", high: str = "high", form: str = ",.0f") -> str:
    """Format the lowest and the highest of a row's repeats, or why there are none."""
    if row["error"]:
        return NOT_INSTALLED if row["error"] == NOT_INSTALLED else "failed: see below"
    return f"{number(row[low], form)} .. {number(row[high], form)}"


def cell(key: str, form: str = ",.0f") -> Callable[[Row], str]:
    """Return a function that formats a value of a row."""
    return lambda row: number(row[key], form)


def show_rows(title: str, columns: Mapping[str, Callable[[Row], str]], rows: Iterable[Row]) -> None:
    """Print a table; a column formats a row."""
    show(title, list(columns), [[column(row) for column in columns.values()] for row in rows])


def require_measured(rows: Iterable[Row], name: Callable[[Row], str]) -> None:
    """Raise CommandError with the errors of the rows that could not be measured, NOT_INSTALLED aside."""
    failed = [f"{name(row)}: {row['error']}" for row in rows if row["error"] not in (None, NOT_INSTALLED)]
    if failed:
        raise CommandError("\n".join(failed))
