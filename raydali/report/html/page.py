"""report.html of one run: from its history to the page."""

import base64
import io
import re
import time
from collections.abc import Mapping, Sequence
from html import escape

from raydali.report.html import text as words
from raydali.report.html.assets import page, section
from raydali.report.html.charts import Line, lines, stack
from raydali.report.html.heatmap import heat_map
from raydali.report.html.history import Epoch, History
from raydali.report.html.text import DASH, count, figure, percent, seconds
from raydali.report.html.timeline import marks, timeline

MAX_EPOCHS, MAX_METRICS = 100, 24
"""In the table of epochs, the newest; and among the learning curves, the first."""
SAMPLES_BYTES = 600_000
"""Of the sample sheet; a larger one is made smaller."""
PARTS = (
    ("waiting for the loader", 1, "loader_wait_seconds"),
    ("stepping", 0, "step_seconds"),
    ("checkpointing", 3, "checkpoint_seconds"),
)


def run_page(history: History, *, again: float = 0) -> bytes:
    """The page.

    Args:
        again: while the run goes on: seconds after which an open page looks for a newer one; 0: never.
    """
    now = time.time()
    parts = (
        _top(history, now),
        section("Speed", _speed(history)),
        section("Ranks", _ranks(history.epochs)),
        section("Learning", _learning(history)),
        section("Events", timeline(history, now if again else None), card=True),
        section("Samples", _samples(history.samples), card=True),
        section("Epochs", _table(history), card=True),
        section("Settings", _names_and_values(words.settings(history)), card=True),
        section("Environment", _names_and_values(words.environment(history)), card=True),
    )
    footer = f"<footer>Written by raydali from {escape(history.place)}. {DASH}: not measured, or not given.</footer>\n"
    return page(f"{history.name}: {words.STATUS[history.status]}", "".join(parts) + footer, again=again)


def _top(history: History, now: float) -> str:
    status = history.status
    verdict = words.verdict(history)
    said = [words.state(history), words.speed(history), words.waited(history)]
    summary = f'<p class="summary">{escape(" ".join(sentence for sentence in said if sentence))}</p>'
    if verdict is not None:
        summary += f'<p class="summary verdict">Verdict on epoch {verdict[0]}: {escape(verdict[1])}</p>'
    sums = history.sum("seconds")
    figures = (
        ("epochs", words.epochs_of(history)),
        ("images/s", count(history.images_per_second)),
        ("of the ceiling", percent(history.of_ceiling)),
        ("waiting", percent(history.waiting)),
        ("time in epochs", seconds(sums[0] if sums else None)),
        *((name, _newest(history, name)) for name in history.metrics[:2]),
    )
    facts = [words.where(history), f"{history.place}, written {words.moment(now)}"]
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures)
    return (
        f'<header><span class="badge {status}">{words.STATUS[status]}</span><h1>{escape(history.name)}</h1>'
        f'<p class="soft">{escape("; ".join(fact for fact in facts if fact))}</p>{summary}'
        f'<dl class="figures">{cells}</dl></header>\n'
    )


def _newest(history: History, name: str) -> str:
    values = [epoch.validation[name] for epoch in history.epochs if name in epoch.validation]
    return figure(values[-1] if values else None)


def _x(epochs: Sequence[Epoch]) -> list[float]:
    return [float(epoch.number) for epoch in epochs]


def _line(epochs: Sequence[Epoch], name: str, label: str, colour: int, *, dashed: bool = False) -> Line:
    return Line(label, _x(epochs), [epoch.get(name) for epoch in epochs], colour, dashed)


def _speed(history: History) -> str:
    epochs, resumed = history.epochs, marks(history)
    throughput = [
        _line(epochs, "images_per_second", "images/s", 0),
        _line(epochs, "ceiling_images_per_second", "ceiling", 5, dashed=True),
        _line(epochs, "loader_images_per_second", "loader alone", 6),
    ]
    shares = [
        _line(epochs, "of_ceiling", "of the ceiling", 0),
        _line(epochs, "loader_wait_fraction", "waiting for the loader", 1),
    ]
    return (
        lines("Images a second, by epoch", throughput, marks=resumed)
        + _times(history)
        + lines("Shares, by epoch", shares, share=True, marks=resumed)
    )


def _times(history: History) -> str:
    """Where each epoch's seconds went: validation stands beside `seconds`, all else is a part of it."""
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
    return stack(
        "Seconds, by epoch",
        _x(epochs),
        [*stacked[:2], ("validating", 2, validating), stacked[2], ("other", 5, rest)],
        starting,
    )


def _ranks(epochs: Sequence[Epoch]) -> str:
    numbers = [epoch.number for epoch in epochs]
    waiting, stepping = ([getattr(epoch, name) for epoch in epochs] for name in ("waiting", "stepping"))
    return heat_map("Waiting for the loader, share of each rank's time", numbers, waiting, share=True) + heat_map(
        "Stepping, milliseconds for an image", numbers, stepping, share=False, unit=" ms"
    )


def _learning(history: History) -> str:
    epochs, resumed = history.epochs, marks(history)
    losses = [
        _line(epochs, "loss", "training", 0),
        Line("validation", _x(epochs), [epoch.validation.get("loss") for epoch in epochs], 1),
    ]
    charts = lines("Loss, by epoch", losses, marks=resumed)
    for names in metric_groups(history.metrics[:MAX_METRICS]):
        curves = [
            Line(name, _x(epochs), [epoch.validation.get(name) for epoch in epochs], i) for i, name in enumerate(names)
        ]
        charts += lines(f"{', '.join(names)}, by epoch", curves, from_zero=False, marks=resumed)
    rate = [_line(epochs, "learning_rate", "learning rate", 2)]
    return charts + lines("Learning rate, by epoch", rate, marks=resumed)


def metric_groups(names: Sequence[str]) -> list[list[str]]:
    """Names that share an axis: top1 with top5, psnr with input_psnr, map with map_50."""
    groups: dict[str, list[str]] = {}
    for name in names:
        stem = re.match(r"[A-Za-z]+", name.removeprefix("input_"))
        groups.setdefault(stem[0] if stem else name, []).append(name)
    return list(groups.values())


def _samples(png: bytes | None) -> str:
    if png is None:
        return ""
    try:
        kind, data = _fitting(png)
    except Exception:  # a picture that cannot be read is no reason to have no page
        return "<p>samples.png cannot be read.</p>"
    source = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return f'<div class="samples"><img alt="samples.png: input, output and truth" src="{source}"></div>'


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


def _table(history: History) -> str:
    """The newest epochs in numbers: what the charts show, for those who cannot see them."""
    if not history.epochs:
        return ""
    shown = history.epochs[-MAX_EPOCHS:]
    metrics = history.metrics[:MAX_METRICS]
    own = (
        ("images", "images", count),
        ("images/s", "images_per_second", count),
        ("ceiling", "of_ceiling", percent),
        ("wait", "loader_wait_fraction", percent),
        ("seconds", "seconds", figure),
        ("workers", "world_size", count),
        ("loss", "loss", figure),
        ("learning rate", "learning_rate", figure),
    )
    head = "".join(
        f'<th scope="col">{escape(name)}</th>' for name in ("epoch", *(name for name, _, _ in own), *metrics)
    )
    rows = ""
    for epoch in shown:
        values = [form(epoch.get(name)) for _, name, form in own]
        values += [figure(epoch.validation.get(name)) for name in metrics]
        rows += f'<tr><th scope="row">{epoch.number}</th>' + "".join(f"<td>{value}</td>" for value in values) + "</tr>"
    every = len(shown) == len(history.epochs)
    title = (
        f"All {len(shown)} in numbers"
        if every
        else f"The newest {len(shown)} of {count(len(history.epochs))} in numbers"
    )
    return (
        f'<details><summary>{title}</summary><div class="wide"><table class="epochs"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _names_and_values(values: Mapping[str, str]) -> str:
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in values.items())
    return f'<dl class="settings">{rows}</dl>' if rows else ""
