"""Looks at the earlier starts of a run: whether it is resumed or finished, and which settings have changed."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from raydali.errors import UsageError
from raydali.run.events import RunEndedEarly, RunFinished
from raydali.run.find import look_at, read_settings
from raydali.run.folder import EVENTS, RunFolder
from raydali.text import plural

SELECTING = "val_data", "val_fraction", "fold", "val_group", "root", "label_column", "multi_label", "exclude"
"""Options by which the same --data gives other samples or labels."""
CONSEQUENCES = {"batch_size": ": steps keep their samples; BatchNorm's groups and random numbers change"}
"""Clauses about the consequences of changed settings."""


@dataclass(frozen=True)
class PreviousRun:
    """The state that earlier starts of the same run left; `ended_early` if the last one has ended as it should."""

    settings: dict[str, Any]
    finished: bool
    ended_early: bool = False


def previous_run(folder: RunFolder, defaults: Mapping[str, Any] | None = None) -> PreviousRun | None:
    """Return the state that earlier starts left; None if there were none.

    Args:
        folder: the run's.
        defaults: values of options that are newer than the run.

    Raises:
        UsageError: the run cannot go on, the folder is foreign or cannot be read, or `config.json` is broken.
    """
    kind, why = look_at(folder)
    if kind == "empty":
        return None
    if kind != "run":
        remedy = "restore one" if kind == "stuck" else "move it away"
        raise UsageError(f"{folder} cannot be trained: {why}: {remedy}, or give another --name")
    events = folder.rows(EVENTS)
    try:
        settings = _as_json(defaults or {}) | read_settings(folder)
    except UsageError as error:
        raise UsageError(f"{error}, or give another --name") from error
    kinds = [row["event"] for row in events]
    return PreviousRun(settings, RunFinished.event in kinds, kinds[-1:] == [RunEndedEarly.event])


def check_unchanged(folder: RunFolder, earlier: PreviousRun, settings: dict[str, Any], names: Collection[str]) -> None:
    """Refuse a resume whose stream or model would differ.

    Args:
        folder: the run's, for the message.
        earlier: the previous start.
        settings: the settings of this start.
        names: the settings that must not change.

    Raises:
        UsageError: names every changed setting with both values.
    """
    if changed := changes(earlier, settings, names):
        words = [_data_words(earlier.settings, settings)] if changed.pop("fingerprint", None) else []
        if changed.pop("weights_sha256", None):
            was, now = (start.get("weights") or "none" for start in (earlier.settings, settings))
            words.append(f"--weights was {was}, now {now if now != was else 'with other contents'}")
        raise UsageError(
            f"{folder} cannot be resumed with other settings ({'; '.join([*words, *describe_changes(changed)])}): "
            f"give the earlier ones, or --name {folder.name}-2 for a new run"
        )


def changes(earlier: PreviousRun, settings: dict[str, Any], names: Collection[str]) -> dict[str, tuple[Any, Any]]:
    """Return the named settings that have changed, with their old and new values."""
    was, now = earlier.settings, _as_json(settings)
    return {name: (was.get(name), now[name]) for name in names if was.get(name) != now[name]}


def describe_changes(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """Return a phrase for each changed setting."""
    return [f"{name} was {was!r}, now {now!r}{CONSEQUENCES.get(name, '')}" for name, (was, now) in changed.items()]


def _data_words(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe both training sets, which differ in names or labels."""
    before, after = (
        f"{'--data ' + start['data'] if start.get('data') else 'built-in data'} of "
        f"{plural(start.get('samples') or 0, 'sample')}"
        for start in (was, now)
    )
    both = {name: (was.get(name), now.get(name)) for name in SELECTING}
    selection = describe_changes(
        {name: (old, new) for name, (old, new) in both.items() if (old or None) != (new or None)}
    )
    same = after if selection else "with other names or labels"
    return "; ".join([f"data was {before}, now {after if after != before else same}", *selection])


def _as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings as they are read back from JSON, which has no tuples."""
    result: dict[str, Any] = json.loads(json.dumps(settings))
    return result
