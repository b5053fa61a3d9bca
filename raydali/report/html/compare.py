"""One page for several runs: a table of what each reached, their curves in common charts, and what differs in them."""

import time
from collections.abc import Callable, Mapping, Sequence
from html import escape

from raydali.report.html import text as words
from raydali.report.html.assets import page, section
from raydali.report.html.charts import Line, lines
from raydali.report.html.history import Epoch, History
from raydali.report.html.page import MAX_METRICS
from raydali.report.html.text import DASH, count, figure, percent, seconds


def compare_page(histories: Sequence[History]) -> bytes:
    """The page; runs are shown in the order given, each in its colour."""
    labels = _labels(histories)
    metrics = list(dict.fromkeys(name for history in histories for name in history.metrics))[:MAX_METRICS]
    body = (
        f'<header><h1>{len(histories)} runs beside one another</h1><p class="soft">written '
        f"{words.moment(time.time())}</p></header>\n"
        f"<section><h2>Reached</h2>{_table(histories, labels, metrics)}</section>\n"
        f"{section('Speed', _speed(histories, labels))}{section('Learning', _learning(histories, labels, metrics))}"
        f"<section><h2>Settings that differ</h2>{_differing(list(map(words.settings, histories)), labels)}</section>\n"
        f"<section><h2>Environments that differ</h2>"
        f"{_differing(list(map(words.environment, histories)), labels)}</section>\n"
        f"<footer>Written by raydali. {DASH}: not measured, or not given.</footer>\n"
    )
    return page(" / ".join(labels), body)


def _labels(histories: Sequence[History]) -> list[str]:
    """Names where they tell the runs apart, else folders."""
    names = [history.name for history in histories]
    return names if len(set(names)) == len(names) else [history.place for history in histories]


def _table(histories: Sequence[History], labels: Sequence[str], metrics: Sequence[str]) -> str:
    heads = ("run", "state", "epochs", "workers", "images/s", "of the ceiling", "waiting", "time in epochs", "loss")
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in (*heads, *metrics))
    rows = ""
    for i, (history, label) in enumerate(zip(histories, labels, strict=True)):
        newest = history.epochs[-1] if history.epochs else None
        sums = history.sum("seconds")
        values = (
            words.STATUS[history.status],
            words.epochs_of(history),
            count(newest.get("world_size") if newest else None),
            count(history.images_per_second),
            percent(history.of_ceiling),
            percent(history.waiting),
            seconds(sums[0] if sums else None),
            figure(newest.get("loss") if newest else None),
            *(figure(newest.validation.get(name) if newest else None) for name in metrics),
        )
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        rows += f'<tr><th scope="row"><i class="dot c{i % 8}"></i>{escape(label)}</th>{cells}</tr>'
    return (
        f'<div class="card wide"><table class="epochs"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
        '<p class="soft">Loss and validation are the newest epoch\'s, all else is over all epochs.</p>'
    )


def _curves(histories: Sequence[History], labels: Sequence[str], value: Callable[[Epoch], float | None]) -> list[Line]:
    return [
        Line(label, [float(epoch.number) for epoch in history.epochs], [value(epoch) for epoch in history.epochs], i)
        for i, (history, label) in enumerate(zip(histories, labels, strict=True))
    ]


def _speed(histories: Sequence[History], labels: Sequence[str]) -> str:
    return (
        lines("Images a second, by epoch", _curves(histories, labels, lambda e: e.get("images_per_second")))
        + lines("Share of the ceiling, by epoch", _curves(histories, labels, lambda e: e.get("of_ceiling")), share=True)
        + lines(
            "Waiting for the loader, by epoch",
            _curves(histories, labels, lambda e: e.get("loader_wait_fraction")),
            share=True,
        )
    )


def _learning(histories: Sequence[History], labels: Sequence[str], metrics: Sequence[str]) -> str:
    charts = lines("Training loss, by epoch", _curves(histories, labels, lambda e: e.get("loss")))
    charts += lines("Validation loss, by epoch", _curves(histories, labels, lambda e: e.validation.get("loss")))
    for name in metrics:
        curves = _curves(histories, labels, lambda e, name=name: e.validation.get(name))  # type: ignore[misc]
        charts += lines(f"{name}, by epoch", curves, from_zero=False)
    return charts


def _differing(runs: Sequence[Mapping[str, str]], labels: Sequence[str]) -> str:
    rows = ""
    for name in dict.fromkeys(name for run in runs for name in run):
        values = [run.get(name, DASH) for run in runs]
        if name != "name" and len(set(values)) > 1:
            cells = "".join(f"<td>{escape(value)}</td>" for value in values)
            rows += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    if not rows:
        return "<p>None.</p>"
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in ("", *labels))
    return f'<div class="card wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
