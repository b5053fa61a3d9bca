"""The pages: report.html of one run, and one page for several, with a table of results, common charts and what differs.

A page needs no other file and no network.
"""

import base64
import io
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from raydali.report.html import text
from raydali.report.html.charts import COLOURS, Chart, Line, Ticks, chart
from raydali.report.html.evaluation import evaluation_section
from raydali.report.html.event_table import event_table
from raydali.report.html.history import VALIDATION, History
from raydali.report.html.text import DASH, NOT_MEASURED, count, figure, percent
from raydali.run.folder import EVALUATION, SAMPLES, WORST
from raydali.run.ledger import PARTS as LEDGER_PARTS
from raydali.run.ledger import figures_of, parts_of
from raydali.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_EPOCHS, MAX_METRICS = 100, 24
"""Limits of the table of epochs, which shows the newest, and of the learning curves, which show the first metrics."""
SAMPLES_BYTES = 600_000
"""Limit of the embedded samples.png, and of worst.png; a larger one is made smaller."""
PARTS = (
    ("waiting for the loader", "loader_wait_seconds", 1),
    ("stepping", "step_seconds", 0),
    ("checkpointing", "checkpoint_seconds", 3),
)
COLUMNS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("images", "images", count),
    ("images/s", "images_per_second", count),
    ("ceiling", "of_ceiling", percent),
    ("GPU busy", "gpu_busy", percent),
    ("MFU", "mfu", percent),
    ("wait", "loader_wait_fraction", percent),
    ("seconds", "seconds", figure),
    ("workers", "world_size", count),
    ("loss", "loss", figure),
    ("learning rate", "learning_rate", figure),
)

COMPARED = (
    ("Images a second", "images_per_second", False),
    ("Share of the ceiling", "of_ceiling", True),
    ("Waiting for the loader", "loader_wait_fraction", True),
)
"""Charts of the page for several runs: title, number, and whether it is a share."""


def render(template: str, **values: Any) -> bytes:
    """Fill a template of `templates/`; the page is UTF-8.

    Templates escape whatever they are given, so that no name or error can be markup.
    """
    text = _environment().get_template(template).render(values)
    return printable(text, lines=True).encode()


@cache
def _environment() -> "Environment":
    # Imported with the first page: 0.12 s, which the refusal of a mistyped option need not wait for.
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader(__name__.rpartition(".")[0])
    environment = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["count"] = count
    environment.globals["asset"] = lambda name: Markup(loader.get_source(environment, name)[0])
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def run_page(history: History, *, reload_seconds: float = 0) -> bytes:
    """Render the page of a run.

    Args:
        history: of the run.
        reload_seconds: interval at which an open page loads a newer one while the run goes on; 0: never.
    """
    status = text.STATES[history.status][0]
    events = event_table(history)
    columns = [column for column in COLUMNS if any(value is not None for value in history.each(column[1]))]
    columns += [(name, f"{VALIDATION}{name}", figure) for name in history.metrics[:MAX_METRICS]]
    newest = history.epochs[-1] if history.epochs else None
    published = text.beside_published(history) if history.status in ("finished", "ended early") else None
    return render(
        "run.html.jinja",
        reload_seconds=reload_seconds,
        title=f"{history.name}: {status}",
        dash=DASH,
        history=history,
        status=status,
        facts="; ".join(filter(None, [text.where(history), f"{history.folder}, written {text.moment(time.time())}"])),
        summary=" ".join(filter(None, [text.state(history), text.speed(history), text.waited(history)])),
        published=published and f"{published[0].upper()}{published[1:]}.",
        scores=text.last_and_best(history),
        verdict=newest and newest.verdict and f"Verdict on epoch {newest.number}: {newest.verdict}",
        ledger=ledger_bar(history),
        figures=[*text.figures(history).items(), *((name, _newest(history, name)) for name in history.metrics[:2])],
        speed=_speed(history, events.marks),
        learning=_learning(history, events.marks),
        events=events.rows,
        samples=_picture(history.files.get(SAMPLES)),
        evaluation=evaluation_section(history.files.get(EVALUATION)),
        worst=_picture(history.files.get(WORST)),
        head=["epoch", *(name for name, _, _ in columns)],
        rows=[
            [str(epoch.number), *(form(epoch.get(name)) for _, name, form in columns)]
            for epoch in history.epochs[-MAX_EPOCHS:]
        ],
        settings=text.settings(history).items(),
        environment=text.environment(history).items(),
    )


def ledger_bar(history: History) -> dict[str, Any] | None:
    """Return what the bar of the ledger draws: its parts, from the largest to the smallest, and its lines of text."""
    ledger = history.ledger
    if ledger is None:
        return None
    colours = {part: f"c{i % COLOURS}{' light' if i >= COLOURS else ''}" for i, part in enumerate(LEDGER_PARTS)}
    parts = [(name, colours[part], share) for part, name, share in parts_of(ledger)]
    hours = ledger["worker_seconds"]["held"] / 3600
    beside = ledger["seconds"]
    return {
        "parts": parts,
        "legend": [(f"{name} {percent(share)}", colour) for name, colour, share in parts],
        "text": f"Workers were held for {figure(hours)} hours; {figures_of(ledger)}. Beside it, "
        f"{text.seconds(beside['before_placement'])} passed before workers were placed, and "
        f"{text.seconds(beside['without_driver'])} without a driver.",
    }


def _newest(history: History, name: str) -> str:
    values = [value for value in history.each(f"{VALIDATION}{name}") if value is not None]
    return figure(values[-1] if values else None)


def curve(history: History, name: str, label: str, colour: int, *, dashed: bool = False) -> Line:
    """The line of a number over the epochs of a run."""
    return Line(label, [float(epoch.number) for epoch in history.epochs], history.each(name), colour, dashed)


def _speed(history: History, marks: Ticks) -> list[Chart]:
    rates = [
        curve(history, "images_per_second", "images/s", 0),
        curve(history, "ceiling_images_per_second", "ceiling", 5, dashed=True),
        curve(history, "loader_images_per_second", "loader alone", 6),
    ]
    shares = [
        curve(history, "of_ceiling", "of the ceiling", 0),
        curve(history, "mfu", "MFU", 2),
        curve(history, "loader_wait_fraction", "waiting for the loader", 1),
    ]
    return [
        *chart("Images a second, by epoch", rates, marks=marks),
        *_times(history),
        *chart("Shares, by epoch", shares, share=True, marks=marks),
    ]


def _times(history: History) -> list[Chart]:
    """Where each epoch's time went. Validation is not part of the epoch's `seconds`, all else is."""
    starting = [0.0] * len(history.epochs)
    for _, step, took in history.starts():
        for i, epoch in enumerate(history.epochs):
            if step is not None and took is not None and (epoch.get("step") or 0) > step:
                starting[i] += took
                break
    lines = [curve(history, name, label, colour) for label, name, colour in PARTS]
    validating = curve(history, f"{VALIDATION}seconds", "validating", 2)
    rest = [
        None if None in (whole, *parts) else max(0.0, whole - sum(parts))
        for whole, *parts in zip(history.each("seconds"), *(line.y for line in lines), strict=True)
    ]
    other = replace(validating, label="other", y=rest, colour=5)
    lines = [*lines[:2], validating, *lines[2:], other]
    # A start may take far longer than an epoch.
    highest = max(
        (sum(y or 0.0 for y in column) for column in zip(*(line.y for line in lines), strict=True)), default=0
    )
    lines.append(replace(validating, label="starting", y=starting, colour=7))
    return chart("Seconds, by epoch", lines, stacked=True, highest=1.4 * highest or math.inf)


def _learning(history: History, marks: Ticks) -> list[Chart]:
    losses = [curve(history, "loss", "training", 0), curve(history, f"{VALIDATION}loss", "validation", 1)]
    charts = chart("Loss, by epoch", losses, marks=marks)
    for names in metric_groups(history.metrics[:MAX_METRICS]):
        curves = [curve(history, f"{VALIDATION}{name}", name, i) for i, name in enumerate(names)]
        charts += chart(f"{', '.join(names)}, by epoch", curves, from_zero=False, marks=marks)
    return charts + chart("Learning rate, by epoch", [curve(history, "learning_rate", "learning rate", 2)], marks=marks)


def metric_groups(names: Sequence[str]) -> list[list[str]]:
    """Group the names that share an axis: top1 with top5, psnr with input_psnr, map with map_50."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem = re.match(r"[A-Za-z]+", name.removeprefix("input_"))
        groups.setdefault(stem[0] if stem else name, []).append(name)
    return list(groups.values())


def _picture(png: bytes | None) -> str:
    """Return samples.png or worst.png as a data URI; empty if there is none, or none that can be read."""
    from PIL import Image

    data, kind = png or b"", "png"
    try:
        image = Image.open(io.BytesIO(data)).convert("RGB")
    except Exception:  # an unreadable picture is no reason to have no page
        return ""
    while len(data) > SAMPLES_BYTES:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=85)
        data, kind = file.getvalue(), "jpeg"
        image = image.resize((max(1, image.width * 2 // 3), max(1, image.height * 2 // 3)))
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def compare_page(histories: Sequence[History]) -> bytes:
    """Render the page for several runs, in the order given, each in its colour."""
    labels = [history.name for history in histories]
    if len(set(labels)) < len(labels):
        labels = [history.folder for history in histories]
    runs = [*zip(histories, labels, strict=True)]
    metrics = list(dict.fromkeys(name for history in histories for name in history.metrics))[:MAX_METRICS]
    table = [_compared_row(history, label, metrics) for history, label in runs]
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
        folds=text.scores_of_folds(histories),
        speed=[chart for title, name, share in COMPARED for chart in curves(title, name, share=share)],
        learning=learning,
        settings=_differing([text.settings(history) for history in histories]),
        environments=_differing([text.environment(history) for history in histories]),
    )


def _compared_row(history: History, label: str, metrics: Sequence[str]) -> dict[str, str]:
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
