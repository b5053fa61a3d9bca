"""report.html of one run."""

import base64
import io
import re
import time
from collections.abc import Callable, Sequence

from raydali.report.html import text
from raydali.report.html.charts import Chart, Line, lines, stack
from raydali.report.html.evaluation import evaluation_section
from raydali.report.html.history import Epoch, History
from raydali.report.html.render import render
from raydali.report.html.text import DASH, count, figure, percent, seconds
from raydali.report.html.timeline import event_rows, event_strip, marks

MAX_EPOCHS, MAX_METRICS = 100, 24
"""Limits of the table of epochs, which shows the newest, and of the learning curves, which show the first metrics."""
SAMPLES_BYTES = 600_000
"""Limit of the embedded samples.png, and of worst.png; a larger one is made smaller."""
PARTS = (
    ("waiting for the loader", 1, "loader_wait_seconds"),
    ("stepping", 0, "step_seconds"),
    ("checkpointing", 3, "checkpoint_seconds"),
)
COLUMNS = (
    ("images", "images", count),
    ("images/s", "images_per_second", count),
    ("ceiling", "of_ceiling", percent),
    ("MFU", "mfu", percent),
    ("wait", "loader_wait_fraction", percent),
    ("seconds", "seconds", figure),
    ("workers", "world_size", count),
    ("loss", "loss", figure),
    ("learning rate", "learning_rate", figure),
)


def run_page(history: History, *, reload_seconds: float = 0) -> bytes:
    """Render the page of a run.

    Args:
        history: of the run.
        reload_seconds: interval at which an open page loads a newer one while the run goes on; 0: never.
    """
    now, status = time.time(), text.STATUS[history.status]
    return render(
        "run.html.jinja",
        reload_seconds=reload_seconds,
        title=f"{history.name}: {status}",
        dash=DASH,
        history=history,
        status=status,
        facts="; ".join(filter(None, [text.where(history), f"{history.folder}, written {text.moment(now)}"])),
        summary=" ".join(filter(None, [text.state(history), text.speed(history), text.waited(history)])),
        published=text.published(history),
        scores=text.last_and_best(history),
        verdict=text.verdict(history),
        figures=_figures(history),
        speed=_speed(history),
        learning=_learning(history),
        events=event_rows(history),
        strip=event_strip(history, now if reload_seconds else None),
        samples=_picture(history.samples),
        evaluation=evaluation_section(history.evaluation),
        worst=_picture(history.worst),
        head=["epoch", *(name for name, _, _ in _columns(history)), *history.metrics[:MAX_METRICS]],
        rows=_rows(history),
        settings=text.settings(history).items(),
        environment=text.environment(history).items(),
    )


def _figures(history: History) -> list[tuple[str, str]]:
    sums = history.sum("seconds")
    return [
        ("epochs", text.epochs_of(history)),
        ("images/s", count(history.images_per_second)),
        ("of the ceiling", percent(history.of_ceiling)),
        ("waiting", percent(history.waiting)),
        ("time in epochs", seconds(sums[0] if sums else None)),
        *((name, _newest(history, name)) for name in history.metrics[:2]),
    ]


def _newest(history: History, name: str) -> str:
    values = [epoch.validation[name] for epoch in history.epochs if name in epoch.validation]
    return figure(values[-1] if values else None)


def _x(epochs: Sequence[Epoch]) -> list[float]:
    return [float(epoch.number) for epoch in epochs]


def _line(epochs: Sequence[Epoch], name: str, label: str, colour: int, *, dashed: bool = False) -> Line:
    return Line(label, _x(epochs), [epoch.get(name) for epoch in epochs], colour, dashed)


def _validation_line(epochs: Sequence[Epoch], name: str, label: str, colour: int) -> Line:
    return Line(label, _x(epochs), [epoch.validation.get(name) for epoch in epochs], colour)


def _speed(history: History) -> list[Chart]:
    epochs, resumed = history.epochs, marks(history)
    throughput = [
        _line(epochs, "images_per_second", "images/s", 0),
        _line(epochs, "ceiling_images_per_second", "ceiling", 5, dashed=True),
        _line(epochs, "loader_images_per_second", "loader alone", 6),
    ]
    shares = [
        _line(epochs, "of_ceiling", "of the ceiling", 0),
        _line(epochs, "mfu", "MFU", 2),
        _line(epochs, "loader_wait_fraction", "waiting for the loader", 1),
    ]
    return [
        *lines("Images a second, by epoch", throughput, marks=resumed),
        *_times(history),
        *lines("Shares, by epoch", shares, share=True, marks=resumed),
    ]


def _times(history: History) -> list[Chart]:
    """Where each epoch's time went. Validation is not part of the epoch's `seconds`, all else is."""
    epochs = history.epochs
    starting: list[float | None] = [None] * len(epochs)
    for _, step, took in history.starts():
        for i, epoch in enumerate(epochs):
            if step is not None and took is not None and (epoch.get("step") or 0) > step:
                starting[i] = (starting[i] or 0.0) + took
                break
    named = [[epoch.get(name) for epoch in epochs] for _, _, name in PARTS]
    rest: list[float | None] = []
    for i, epoch in enumerate(epochs):
        whole, known = epoch.get("seconds"), [column[i] for column in named]
        parts = [value for value in known if value is not None]
        rest.append(max(0.0, whole - sum(parts)) if whole is not None and len(parts) == len(known) else None)
    stacked = [(label, colour, column) for (label, colour, _), column in zip(PARTS, named, strict=True)]
    validating = [epoch.validation.get("seconds") for epoch in epochs]
    columns = [*stacked[:2], ("validating", 2, validating), stacked[2], ("other", 5, rest)]
    return stack("Seconds, by epoch", _x(epochs), columns, starting)


def _learning(history: History) -> list[Chart]:
    epochs, resumed = history.epochs, marks(history)
    losses = [_line(epochs, "loss", "training", 0), _validation_line(epochs, "loss", "validation", 1)]
    charts = lines("Loss, by epoch", losses, marks=resumed)
    for names in metric_groups(history.metrics[:MAX_METRICS]):
        curves = [_validation_line(epochs, name, name, i) for i, name in enumerate(names)]
        charts += lines(f"{', '.join(names)}, by epoch", curves, from_zero=False, marks=resumed)
    rate = [_line(epochs, "learning_rate", "learning rate", 2)]
    return charts + lines("Learning rate, by epoch", rate, marks=resumed)


def metric_groups(names: Sequence[str]) -> list[list[str]]:
    """Group the names that share an axis: top1 with top5, psnr with input_psnr, map with map_50."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem = re.match(r"[A-Za-z]+", name.removeprefix("input_"))
        groups.setdefault(stem[0] if stem else name, []).append(name)
    return list(groups.values())


def _columns(history: History) -> Sequence[tuple[str, str, Callable[[float | None], str]]]:
    """Return those of COLUMNS that some epoch has: none has an MFU on CPUs."""
    return [column for column in COLUMNS if any(epoch.get(column[1]) is not None for epoch in history.epochs)]


def _rows(history: History) -> list[list[str]]:
    """The newest epochs in numbers: the content of the charts, for readers who cannot see them."""
    columns, metrics = _columns(history), history.metrics[:MAX_METRICS]
    return [
        [
            str(epoch.number),
            *(form(epoch.get(name)) for _, name, form in columns),
            *(figure(epoch.validation.get(name)) for name in metrics),
        ]
        for epoch in history.epochs[-MAX_EPOCHS:]
    ]


def _picture(png: bytes | None) -> str:
    """Return samples.png or worst.png as a data URI; empty if there is none, or none that can be read."""
    try:
        kind, data = _fitting(png) if png is not None else ("", b"")
    except Exception:  # an unreadable picture is no reason to have no page
        return ""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}" if data else ""


def _fitting(png: bytes) -> tuple[str, bytes]:
    from PIL import Image

    with Image.open(io.BytesIO(png)) as opened:
        if len(png) <= SAMPLES_BYTES and opened.format == "PNG":
            return "png", png
        image = opened.convert("RGB")
    while True:
        data = io.BytesIO()
        image.save(data, "JPEG", quality=85)
        if len(data.getvalue()) <= SAMPLES_BYTES:
            return "jpeg", data.getvalue()
        image = image.resize((max(1, image.width * 2 // 3), max(1, image.height * 2 // 3)))
