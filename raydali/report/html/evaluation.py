"""The section of report.html on the trained model: evaluation.json, as `raydali evaluate` writes it."""

import json
from collections.abc import Mapping, Sequence
from math import sqrt
from typing import Any

from raydali.report.html.history import finite
from raydali.report.html.text import count, figure, moment, percent
from raydali.text import plural

MAX_CLASSES, MAX_MATRIX = 100, 30
"""Limits of the table of classes, which shows the worst, and of the classes of a confusion matrix."""
MAX_CONFUSIONS = MAX_BROKEN = 20
SHADES = 12, 50
"""Strength of the colour of a cell with any sample, and with all of its row, in percent; texts must stand out."""


def evaluation_section(content: bytes | None) -> dict[str, Any] | None:
    """Return the texts of `evaluation.html.jinja`; None if there is no evaluation, or another program wrote it.

    Args:
        content: of evaluation.json.
    """
    try:
        return None if content is None else _section(json.loads(content))
    except Exception:  # whatever lies in the folder under this name, the page shows the run
        return None


def _section(content: Mapping[str, Any]) -> dict[str, Any]:
    metrics = {str(name): finite(value) for name, value in content["metrics"].items()}
    samples, broken, classes = finite(content["samples"]), content.get("broken") or [], content.get("classes") or []
    data = content.get("data") or "the built-in data"
    head, rows, note = _classes(classes)
    return {
        "about": f"{content['weights']} on {data}: {count(samples)} samples, {moment(finite(content.get('time')))}",
        "figures": [(name, figure(value)) for name, value in metrics.items()],
        "calibration": _calibration(metrics),
        "head": head,
        "rows": rows,
        "note": note,
        "matrix": _matrix(content.get("confusion") or [], [str(row["class"]) for row in classes]),
        "confusions": [
            (str(pair["class"]), str(pair["predicted"]), count(finite(pair["samples"])))
            for pair in (content.get("confusions") or [])[:MAX_CONFUSIONS]
        ],
        "broken": [(str(sample["path"]), str(sample["reason"])) for sample in broken[:MAX_BROKEN]],
        "broken_count": len(broken),
    }


def _calibration(metrics: Mapping[str, float | None]) -> str:
    error, confidence, right = (metrics.get(name) for name in ("calibration_error", "confidence", "top1"))
    if error is None:
        return ""
    text = f"Calibration: the confidence is off by {percent(error)} on average (expected calibration error, 15 bins)."
    if confidence is None or right is None:
        return text
    kind = "overconfident" if confidence > right else "underconfident"
    means = f"The mean confidence is {percent(confidence)}, and {percent(right)} of predictions are right"
    return f"{text} {means}: the model is {kind}."


def _classes(classes: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], str]:
    """Return the table's head, its rows and a note on them."""
    if not classes:
        return [], [], ""
    head = [str(name) for name in classes[0]]
    by = head[2]

    def worst_first(row: Mapping[str, Any]) -> tuple[bool, float]:
        value = finite(row[by])
        return value is None, value or 0.0

    rows = [
        [str(row[head[0]]), count(finite(row[head[1]])), *(figure(finite(row[name])) for name in head[2:])]
        for row in sorted(classes, key=worst_first)[:MAX_CLASSES]
    ]
    shown = f"{len(rows)} of " if len(rows) < len(classes) else ""
    return head, rows, f"{shown}{plural(len(classes), 'class')}, those with the lowest {by} first"


def _matrix(confusion: Sequence[Sequence[Any]], names: Sequence[str]) -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Return for each class its name and its cells: number of samples, strength of the colour and a description."""
    if not 2 <= len(confusion) <= MAX_MATRIX:
        return []
    matrix, (least, most) = [], SHADES
    for name, row in zip(names, confusion, strict=True):
        amounts = [finite(value) or 0.0 for value in row]
        whole = sum(amounts) or 1.0
        cells = [
            (
                count(amount) if amount else "",
                round(least + (most - least) * sqrt(amount / whole)) if amount else 0,
                f"{name} predicted as {other}: {count(amount)} of {count(whole)}",
            )
            for other, amount in zip(names, amounts, strict=True)
        ]
        matrix.append((name, cells))
    return matrix
