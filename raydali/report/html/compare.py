"""One page for several runs: a table of results, their curves in common charts, and the settings that differ."""

import time
from collections.abc import Callable, Mapping, Sequence

from raydali.report.html import text
from raydali.report.html.charts import Chart, Line, lines
from raydali.report.html.history import Epoch, History
from raydali.report.html.page import MAX_METRICS
from raydali.report.html.render import render
from raydali.report.html.text import DASH, count, figure, percent, seconds

COLUMNS = ("run", "state", "epochs", "workers", "images/s", "of the ceiling", "waiting", "time in epochs", "loss")


def compare_page(histories: Sequence[History]) -> bytes:
    """Render the page; runs are in the order given, each in its colour."""
    labels = _labels(histories)
    metrics = list(dict.fromkeys(name for history in histories for name in history.metrics))[:MAX_METRICS]
    table = [_row(history, label, metrics) for history, label in zip(histories, labels, strict=True)]
    kept = [i for i, cells in enumerate(zip(*table, strict=True)) if {*cells} != {DASH}]
    return render(
        "compare.html.jinja",
        reload_seconds=0,
        title=" / ".join(labels),
        dash=DASH,
        runs=len(histories),
        written=text.moment(time.time()),
        labels=labels,
        head=[[*COLUMNS, *metrics, "best"][i] for i in kept],
        rows=[[row[i] for i in kept] for row in table],
        speed=_speed(histories, labels),
        learning=_learning(histories, labels, metrics),
        settings=_differing([text.settings(history) for history in histories]),
        environments=_differing([text.environment(history) for history in histories]),
    )


def _labels(histories: Sequence[History]) -> list[str]:
    """The runs' names if no two are equal, else their folders."""
    names = [history.name for history in histories]
    return names if len(set(names)) == len(names) else [history.folder for history in histories]


def _row(history: History, label: str, metrics: Sequence[str]) -> list[str]:
    newest = history.epochs[-1] if history.epochs else None
    sums = history.sum("seconds")
    return [
        label,
        text.STATUS[history.status],
        text.epochs_of(history),
        count(newest.get("world_size") if newest else None),
        count(history.images_per_second),
        percent(history.of_ceiling),
        percent(history.waiting),
        seconds(sums[0] if sums else None),
        figure(newest.get("loss") if newest else None),
        *(figure(newest.validation.get(name) if newest else None) for name in metrics),
        text.scores(history)[1],
    ]


def _curves(histories: Sequence[History], labels: Sequence[str], value: Callable[[Epoch], float | None]) -> list[Line]:
    return [
        Line(label, [float(epoch.number) for epoch in history.epochs], [value(epoch) for epoch in history.epochs], i)
        for i, (history, label) in enumerate(zip(histories, labels, strict=True))
    ]


def _speed(histories: Sequence[History], labels: Sequence[str]) -> list[Chart]:
    rates, shares, waits = (
        _curves(histories, labels, lambda epoch, name=name: epoch.get(name))  # type: ignore[misc]
        for name in ("images_per_second", "of_ceiling", "loader_wait_fraction")
    )
    return [
        *lines("Images a second, by epoch", rates),
        *lines("Share of the ceiling, by epoch", shares, share=True),
        *lines("Waiting for the loader, by epoch", waits, share=True),
    ]


def _learning(histories: Sequence[History], labels: Sequence[str], metrics: Sequence[str]) -> list[Chart]:
    charts = lines("Training loss, by epoch", _curves(histories, labels, lambda epoch: epoch.get("loss")))
    for name in ("loss", *metrics):
        curves = _curves(histories, labels, lambda epoch, name=name: epoch.validation.get(name))  # type: ignore[misc]
        title = "Validation loss" if name == "loss" else name
        charts += lines(f"{title}, by epoch", curves, from_zero=name == "loss")
    return charts


def _differing(runs: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """A row for each name whose values differ: the name, and each run's value."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run.get(name, DASH) for run in runs]
        if name != "name" and len(set(values)) > 1:
            rows.append([name, *values])
    return rows
