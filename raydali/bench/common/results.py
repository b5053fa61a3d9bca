"""The results of a benchmark: rows of a table, the file of --json, and errors of rows."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from raydali.bench.common.processes import MeasurementError
from raydali.errors import CommandError
from raydali.output import machine, show, write_json
from raydali.text import error_line, number

Row = dict[str, Any]
Show = Callable[[dict[str, Any]], None]
_Task = TypeVar("_Task")


def result_of(command: str, settings: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """Return what --json writes."""
    return {"command": command, "machine": machine(), "settings": settings, "rows": rows}


def present(result: dict[str, Any], options: Any, show_table: Show) -> None:
    """Print the table, and write the file that the options name."""
    show_table(result)
    if options.json:
        write_json(result, options.json)


def collect(
    result: dict[str, Any],
    rows: Iterable[Row],
    options: Any,
    *,
    name: Callable[[Row], str],
    line: Callable[[Row], str],
    show_table: Show,
) -> dict[str, Any]:
    """Add rows to the result as they are measured, and write --json after each. Present the result at the end.

    Args:
        result: the result without rows.
        rows: an iterator that measures the rows.
        options: the command's options.
        name: returns the name of a row.
        line: returns a description of a measured row.
        show_table: prints the result.

    Raises:
        CommandError: a row could not be measured; the others were presented.
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
            present(result, options, show_table)
    require_measured(result["rows"], name)
    return result


def measured_row(row: Row, name: str, measure: Callable[[], Any], metrics: Mapping[str, Callable[[Any], Any]]) -> Row:
    """Add "error" and metrics to a row. Metrics are functions of the result of `measure`, and null if this fails."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        measured = measure()
    except MeasurementError as error:
        return row | {"error": str(error)} | dict.fromkeys(metrics)
    return row | {"error": None} | evaluate(metrics, measured)


def evaluate(metrics: Mapping[str, Callable[[Any], Any]], measured: Any) -> Row:
    """Apply every metric to a measurement."""
    return {name: metric(measured) for name, metric in metrics.items()}


def task_of(kind: type[_Task], options: Any, **others: Any) -> _Task:
    """Make a dataclass from `others` and from the options with the names of its other fields."""
    shared = {field.name: getattr(options, field.name) for field in fields(kind) if hasattr(options, field.name)}  # type: ignore[arg-type]
    return kind(**shared | others)


def ratio(value: float | None, other: float | None) -> float | None:
    """Divide two rates; None if one of them was not measured."""
    return value / other if value and other else None


def contender_name(row: Row) -> str:
    """Return the name of a row's loader, with the format that it delivers unless this is 8 bits."""
    return str(row["loader"]) if row["pixels"] == "uint8" else f"{row['loader']} + normalised"


def spread(row: Row, low: str = "low", high: str = "high", form: str = ",.0f") -> str:
    """Format the lowest and the highest of a row's repeats, or the reason why there are none."""
    if row["error"]:
        return "failed: see below"
    return f"{number(row[low], form)} .. {number(row[high], form)}"


def cell(key: str, form: str = ",.0f") -> Callable[[Row], str]:
    """Return a function that formats a value of a row."""
    return lambda row: number(row[key], form)


def show_rows(title: str, columns: Mapping[str, Callable[[Row], str]], rows: Iterable[Row]) -> None:
    """Print a table; the function of a column formats a row."""
    show(title, list(columns), [[column(row) for column in columns.values()] for row in rows])


def require_measured(rows: Iterable[Row], name: Callable[[Row], str]) -> None:
    """Raise CommandError with the errors of the rows that could not be measured."""
    failed = [f"{name(row)}: {row['error']}" for row in rows if row["error"] is not None]
    if failed:
        raise CommandError("\n".join(failed))
