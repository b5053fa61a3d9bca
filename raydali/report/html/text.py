"""The texts of report.html: numbers, and the state of a run."""

import math
import re
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from raydali.report.html.history import History, Status, number
from raydali.report.recipes import beside_published
from raydali.text import duration, plural

DASH = "\u2013"
"""Shown for a value that was not measured."""

STATUS: dict[Status, str] = {
    "finished": "finished",
    "failed": "failed",
    "interrupted": "interrupted",
    "broken": "a worker failed",
    "running": "under way",
    "starting": "starting",
    "empty": "not begun",
}


def count(value: float | None) -> str:
    """A whole number or a rate: 12,345."""
    return DASH if value is None else f"{value:,.0f}" if abs(value) >= 10 or value == round(value) else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Format a share, such as 12.3%."""
    return DASH if value is None else f"{value:.1%}"


def figure(value: float | None) -> str:
    """Any number with four significant digits."""
    if value is None:
        return DASH
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def seconds(value: float | None) -> str:
    """A duration: 12.3 s."""
    return DASH if value is None or not math.isfinite(value) else duration(value)


def many(amount: float | None, noun: str) -> str:
    """A count of something: 1 worker, 2 workers."""
    return f"{DASH} {noun}s" if amount is None else plural(amount, noun)


def moment(value: float | None) -> str:
    """Seconds since 1970 as a date."""
    try:
        return DASH if value is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value))
    except (OverflowError, OSError, ValueError):
        return DASH


def published(history: History) -> str | None:
    """The accuracy of a finished run beside its recipe's, as a sentence; None without a recipe."""
    said = beside_published(history.settings, history.top1) if history.status == "finished" else None
    return said and f"{said[0].upper()}{said[1:]}."


def scores(history: History) -> tuple[str, str]:
    """The score of the last epoch, and the best one; dashes if the best one is not known."""
    if history.best is None or not history.epochs:
        return DASH, DASH
    last, (metric, score, epoch) = history.epochs[-1], history.best
    last_score = f"{metric} {figure(last.validation.get(metric))} in epoch {last.number}"
    return last_score, f"{metric} {figure(score)} in epoch {epoch}"


def last_and_best(history: History) -> str | None:
    """Both scores, and which weights commands use; None if the best score is not known."""
    last, best = scores(history)
    if last == best:
        return None if best == DASH else f"{last}, the last and the best"
    return f"last {last}, best {best} (best/, which evaluate, predict and export use)"


def _epochs(history: History) -> list[float]:
    """The number of completed epochs, and that of all epochs if it is known."""
    asked = number(history.settings.get("epochs"))
    return [len(history.epochs), *([] if asked is None else [asked])]


def epochs_of(history: History) -> str:
    """Format the number of completed epochs, such as 3 of 10."""
    return " of ".join(map(count, _epochs(history)))


def state(history: History) -> str:
    """The state of the run, as a sentence."""
    done = f"{epochs_of(history)} {'epoch' if _epochs(history)[-1] == 1 else 'epochs'}"
    sentence = {
        "finished": f"Finished: {done}.",
        "failed": f"Failed after {done}.",
        "interrupted": f"Interrupted after {done}; the same command goes on.",
        "broken": f"A worker failed after {done}, and no other start is known of yet.",
        "running": f"Under way, unless it ended without a word: {done}.",
        "starting": f"Starting: {done}.",
        "empty": "No step was made yet.",
    }[history.status]
    if history.status in ("failed", "broken") and history.events:
        error = history.events[-1].get("error")
        if isinstance(error, str) and error:
            sentence += f" {error if len(error) <= 400 else error[:400] + chr(0x2026)}"
    return sentence


def speed(history: History) -> str | None:
    """The rate and its share of the ceiling, as a sentence; None before the first epoch."""
    rate, share = history.images_per_second, history.of_ceiling
    if rate is None:
        return None
    said = f"{count(rate)} images/s while training"
    if share is None:
        return f"{said}; the ceiling is not known."
    return f"{said}, {percent(share)} of the ceiling: the speed of the same step with its batch already on the device."


def waited(history: History) -> str | None:
    """The share of time that ranks waited for the loader, as a sentence."""
    share = history.waiting
    return None if share is None else f"The ranks waited for data {percent(share)} of that time."


def verdict(history: History) -> tuple[int, str] | None:
    """The newest epoch's number and verdict, if it has one."""
    newest = history.epochs[-1] if history.epochs else None
    return (newest.number, newest.verdict) if newest is not None and newest.verdict is not None else None


def where(history: History) -> str | None:
    """The workers and the device of the newest start."""
    for row in reversed(history.events):
        if row.get("event") in ("start", "resume"):
            workers = many(number(row.get("world_size")), "worker")
            return f"{workers} on {row['device']}" if isinstance(row.get("device"), str) else workers
    return None


def settings(history: History) -> dict[str, str]:
    """The run's settings by name."""
    return {str(name): shown(value) for name, value in history.settings.items()}


def environment(history: History) -> dict[str, str]:
    """Versions and machines of the run by name; a value that a resume changed is preceded by its step."""
    found: dict[str, dict[str, str]] = {}
    for row in history.events:
        if row.get("event") in ("start", "resume"):
            step = number(row.get("step"))
            for name, value in _environment_of(row).items():
                values = found.setdefault(name, {})
                if not values or value != list(values.values())[-1]:
                    values[f"from step {count(step)}: " if step else ""] = value
    return {name: "; ".join(at + value for at, value in values.items()) for name, values in found.items()}


def _environment_of(start: Mapping[str, Any]) -> dict[str, str]:
    versions, nodes = start.get("versions"), start.get("nodes")
    found = {str(name): shown(value) for name, value in versions.items()} if isinstance(versions, Mapping) else {}
    kinds = Counter(_machine(node) for node in nodes if isinstance(node, Mapping)) if isinstance(nodes, list) else {}
    if kinds:
        texts = (f"{many(n, 'node')} with {kind}{' each' if n > 1 else ''}" for kind, n in kinds.items())
        found["machines"] = "; ".join(texts)
    return found


def _machine(node: Mapping[str, Any]) -> str:
    gpu = f" on {shortened(node['gpu'])}" if node.get("gpu") else ""
    return f"{many(number(node.get('cores')), 'core')}, {many(number(node.get('workers')), 'worker')}{gpu}"


def shortened(text: object) -> str:
    """Return a text of at most 400 characters."""
    words = str(text) if text is not None else DASH
    return words if len(words) <= 400 else f"{words[:400]}\u2026"


def shown(setting: object) -> str:
    """A setting's value: null as a dash, and a URI without its password, since pages are shared."""
    if setting is None:
        return DASH
    if isinstance(setting, bool):
        return "yes" if setting else "no"
    text = ", ".join(map(str, setting)) if isinstance(setting, list) else str(setting)
    return shortened(re.sub(r"://[^/@\s]+@", "://\u2026@", text))
