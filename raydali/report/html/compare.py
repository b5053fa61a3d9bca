"""One page for several runs: a table of results, their curves in common charts, and the settings that differ."""

import time
from collections.abc import Mapping, Sequence

from raydali.report.html import text
from raydali.report.html.charts import Chart, chart
from raydali.report.html.history import VALIDATION, History
from raydali.report.html.page import MAX_METRICS, curve, render
from raydali.report.html.text import DASH, NOT_MEASURED, count, figure

SPEED = (
    ("Images a second", "images_per_second", False),
    ("Share of the ceiling", "of_ceiling", True),
    ("Waiting for the loader", "loader_wait_fraction", True),
)


def compare_page(histories: Sequence[History]) -> bytes:
    """Render the page; runs are in the order given, each in its colour."""
    labels = [history.name for history in histories]
    if len(set(labels)) < len(labels):
        labels = [history.folder for history in histories]
    runs = [*zip(histories, labels, strict=True)]
    metrics = list(dict.fromkeys(name for history in histories for name in history.metrics))[:MAX_METRICS]
    table = [_row(history, label, metrics) for history, label in runs]
    head = [name for name in table[0] if not {row[name] for row in table} <= {DASH, NOT_MEASURED}]

    def curves(title: str, name: str, *, share: bool = False, from_zero: bool = True) -> list[Chart]:
        lines = [curve(history, name, label, i) for i, (history, label) in enumerate(runs)]
        return chart(f"{title}, by epoch", lines, share=share, from_zero=from_zero)

    learning = curves("Training loss", "loss") + curves("Validation loss", f"{VALIDATION}loss")
    for name in metrics:
        learning += curves(name, f"{VALIDATION}{name}", from_zero=False)
    return render(
        "compare.html.jinja",
        reload_seconds=0,
        title=" / ".join(labels),
        dash=DASH,
        runs=len(histories),
        written=text.moment(time.time()),
        labels=labels,
        head=head,
        rows=[[row[name] for name in head] for row in table],
        speed=[chart for title, name, share in SPEED for chart in curves(title, name, share=share)],
        learning=learning,
        settings=_differing([text.settings(history) for history in histories]),
        environments=_differing([text.environment(history) for history in histories]),
    )


def _row(history: History, label: str, metrics: Sequence[str]) -> dict[str, str]:
    get = history.epochs[-1].get if history.epochs else lambda _: None
    return {
        "run": label,
        "state": text.STATES[history.status][0],
        "workers": count(get("world_size")),
        **text.figures(history),
        "loss": figure(get("loss")),
        **{name: figure(get(f"{VALIDATION}{name}")) for name in metrics},
        "best": text.scores(history)[1],
        **text.ledger_figures(history),
    }


def _differing(runs: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """A row for each name whose values differ: the name, and each run's value."""
    names = dict.fromkeys(name for run in runs for name in run if name != "name")
    rows = [[name, *(run.get(name, DASH) for run in runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
