"""The texts on a run: its numbers, its state, its environment, and its recipe."""

import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import mean, stdev
from typing import Any

from raydali.errors import UsageError
from raydali.report.html.history import VALIDATION, Epoch, History, Status, finite
from raydali.run.ledger import energy_of
from raydali.run.model_file import MODEL
from raydali.text import duration, plural
from raydali.training.recipe import Recipe, find_recipe

DASH = "\u2013"
"""Shown for a value that was not measured or not given, where there is no room for words."""
NOT_MEASURED = "not measured"

_OF_FOLDS = {"fold", "name", "samples", "fingerprint", "storage", "workers", "cpus_per_worker", "max_failures", "price"}
"""Settings in which the folds of one configuration may differ."""

STATES: dict[Status, tuple[str, str]] = {
    "finished": ("finished", "Finished: {}."),
    "ended early": ("ended early", "Ended early after {}:"),
    "failed": ("failed", "Failed after {}."),
    "interrupted": ("interrupted", "Interrupted after {}; the same command goes on."),
    "broken": ("a worker failed", "A worker failed after {}, and no other start is known of yet."),
    "running": ("under way", "Under way, unless it ended without a word: {}."),
    "starting": ("starting", "Starting: {}."),
    "empty": ("not begun", "No step was made yet."),
}
"""Each status in a word, and as a sentence about the epochs that are done."""


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


def scores(history: History) -> tuple[str, str]:
    """The score of the last epoch, and the best one; dashes if the best one is not known."""
    if history.best is None or not history.epochs:
        return DASH, DASH
    metric, score, epoch = history.best
    last = _last_validated(history, metric) or history.epochs[-1]
    last_score = f"{metric} {figure(last.get(f'{VALIDATION}{metric}'))} in epoch {last.number}"
    return last_score, f"{metric} {figure(score)} in epoch {epoch}"


def _last_validated(history: History, metric: str) -> Epoch | None:
    return next((row for row in reversed(history.epochs) if row.get(f"{VALIDATION}{metric}") is not None), None)


def scores_of_folds(histories: Sequence[History]) -> str | None:
    """The mean and the standard deviation of the last and the best score over folds; None if runs differ in more."""
    folds = [str(run.settings.get("fold")) for run in histories]
    others = [{name: value for name, value in run.settings.items() if name not in _OF_FOLDS} for run in histories]
    best = [run.best for run in histories if run.best is not None]
    metrics, numbers = {metric for metric, *_ in best}, {fold.partition("/")[2] for fold in folds}
    are_folds = len({*folds}) == len(histories) > 1 and all(settings == others[0] for settings in others)
    if not are_folds or "" in numbers or not len(numbers) == len(metrics) == 1 or len(best) < len(histories):
        return None
    (metric,), (number,) = metrics, numbers
    last = [epoch.values[f"{VALIDATION}{metric}"] for run in histories if (epoch := _last_validated(run, metric))]
    if len(last) < len(histories):
        return None
    of_last, of_best = (
        f"{figure(mean(part))} (standard deviation {figure(stdev(part))})" for part in (last, [row[1] for row in best])
    )
    return f"{metric} over {len(folds)} of {number} folds: last {of_last}, best {of_best}"


def last_and_best(history: History) -> str | None:
    """Both scores, and which weights commands use; None if the best score is not known."""
    last, best = scores(history)
    if last == best:
        return None if best == DASH else f"{last}, the last and the best"
    if last.partition(" in ")[0] == best.partition(" in ")[0]:
        return f"last {last}, no better than epoch {best.split()[-1]} (best/, which evaluate, predict and export use)"
    return f"last {last}, best {best} (best/, which evaluate, predict and export use)"


def epochs_of(history: History) -> str:
    """Format the number of completed epochs, such as 3 of 10."""
    asked = finite(history.settings.get("epochs"))
    return " of ".join(map(count, [len(history.epochs), *([] if asked is None else [asked])]))


def state(history: History) -> str:
    """The state of the run, as a sentence."""
    done = epochs_of(history)
    sentence = STATES[history.status][1].format(f"{done} {'epoch' if done.split()[-1] == '1' else 'epochs'}")
    last = history.events[-1] if history.events else {}
    if history.status == "ended early":
        return f"{sentence} {shortened(last.get('why'))}."
    error = last.get("error") if history.status in ("failed", "broken") else None
    return f"{sentence} {shortened(error)}" if isinstance(error, str) and error else sentence


def speed(history: History) -> str | None:
    """The rate and its share of the ceiling, as a sentence; None before the first epoch."""
    rate, share = history.images_per_second, history.of_ceiling
    if rate is None:
        return None
    start = f"{count(rate)} images/s while training"
    if share is None:
        return f"{start}; the ceiling is not known."
    return f"{start}, {percent(share)} of the ceiling: the speed of the same step with its batch already on the device."


def waited(history: History) -> str | None:
    """The share of time that ranks waited for the loader, as a sentence."""
    if (share := history.waiting) is None:
        return None
    bar = " The bar shows what this cost of all the time: other ranks may train meanwhile on the same cores."
    return f"The ranks waited for data {percent(share)} of that time.{bar if history.ledger else ''}"


def figures(history: History) -> dict[str, str]:
    """The figures over all epochs by name."""
    texts = {
        "epochs": epochs_of(history),
        "images/s": count(history.images_per_second),
        "of the ceiling": percent(history.of_ceiling),
        "waiting": percent(history.waiting),
        "time in epochs": seconds(history.seconds),
    }
    return {name: NOT_MEASURED if value == DASH else value for name, value in texts.items()}


def ledger_figures(history: History) -> dict[str, str]:
    """The figures of the ledger by name."""
    ledger = history.ledger or {}
    cost, hours = ledger.get("cost_usd"), ledger.get("worker_seconds", {}).get("held")
    return {
        "worker hours": figure(None if hours is None else hours / 3600),
        "goodput": NOT_MEASURED if (goodput := ledger.get("goodput")) is None else percent(goodput),
        "energy": NOT_MEASURED if (energy := energy_of(ledger)) is None else energy,
        "cost": DASH if cost is None else f"${cost:,.2f}",
    }


def where(history: History) -> str | None:
    """The workers and the device of the newest start."""
    for row in reversed(history.events):
        if row.get("event") in ("start", "resume"):
            workers = many(finite(row.get("world_size")), "worker")
            return f"{workers} on {row['device']}" if isinstance(row.get("device"), str) else workers
    return None


def settings(history: History) -> dict[str, str]:
    """The run's settings by name, without options that its devices do not have."""
    left_out = "cuda_graph" if (where(history) or "").endswith("cpu") else ""
    return {str(name): shown(value) for name, value in history.settings.items() if name != left_out}


def environment(history: History) -> dict[str, str]:
    """What the run was by name: its command, data, model, versions and machines.

    A value that a resume changed is preceded by its step.
    """
    values_of: dict[str, dict[str, str]] = {}
    for row in history.events:
        if row.get("event") in ("start", "resume"):
            step = finite(row.get("step"))
            for name, value in _environment_of(row).items():
                values = values_of.setdefault(name, {})
                if not values or value != list(values.values())[-1]:
                    values[f"from step {count(step)}: " if step else ""] = value
    texts = {name: "; ".join(at + value for at, value in values.items()) for name, values in values_of.items()}
    with suppress(Exception):  # runs of other tasks have none
        model = json.loads(history.files[MODEL])
        pairs = zip(model["classes"], model["samples_of_classes"], strict=True)
        texts["samples of each class"] = shortened(", ".join(f"{name} {n:,}" for name, n in pairs))
    return texts


def _environment_of(start: Mapping[str, Any]) -> dict[str, str]:
    versions, nodes = start.get("versions"), start.get("nodes")
    facts = {name: shown(start[name]) for name in ("command",) if start.get(name)}
    if parameters := finite(start.get("parameters")):
        facts["parameters"] = count(parameters)
    facts |= {str(name): shown(value) for name, value in versions.items()} if isinstance(versions, Mapping) else {}
    kinds = Counter(_machine(node) for node in nodes if isinstance(node, Mapping)) if isinstance(nodes, list) else {}
    if kinds:
        texts = (f"{many(n, 'node')} with {kind}{' each' if n > 1 else ''}" for kind, n in kinds.items())
        facts["machines"] = "; ".join(texts)
    return facts


def _machine(node: Mapping[str, Any]) -> str:
    gpu = f" on {shortened(node['gpu'])}" if node.get("gpu") else ""
    cpu = f" of {shortened(node['cpu'])}" if node.get("cpu") else ""
    memory = f", {size / 2**30:.1f} GiB of memory" if (size := finite(node.get("memory"))) else ""
    workers = many(finite(node.get("workers")), "worker")
    return f"{many(finite(node.get('cores')), 'core')}{cpu}{memory}, {workers}{gpu}"


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


def recipe_lines(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines on the recipe of a run that begins; none without a recipe.

    Args:
        settings: as `config.json` has them.
    """
    if (recipe := _recipe(settings)) is not None:
        yield f"recipe {settings['recipe']}: top-1 {recipe.top1:.4g} published ({recipe.measured_on}), {recipe.source}"
        for difference in recipe.differences(settings):
            yield f"differs from recipe {settings['recipe']}: {difference}"


def beside_published(history: History) -> str | None:
    """Return the accuracy of a run's last epoch beside the published one; None without a recipe or an accuracy."""
    settings, top1 = history.settings, history.epochs[-1].get(f"{VALIDATION}top1") if history.epochs else None
    if top1 is None or (recipe := _recipe(settings)) is None:
        return None
    text = f"top-1 {top1:.4f}; recipe {settings['recipe']}: {recipe.top1:.4g} published ({recipe.measured_on})"
    differences = ", ".join(recipe.differences(settings))
    return f"{text}; this run differs: {differences}" if differences else text


def _recipe(settings: Mapping[str, Any]) -> Recipe | None:
    name = settings.get("recipe")
    try:
        return find_recipe(name) if isinstance(name, str) else None
    except UsageError:  # of another version
        return None
