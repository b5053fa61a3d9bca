"""Fresh run, resume, or done already: what `config.json` in the run's folder says."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pyarrow.fs import FileType

from raydali.errors import UsageError
from raydali.report.run_folder import CONFIG, EVENTS, RunFolder


@dataclass(frozen=True)
class Earlier:
    """What earlier starts of the same run left.

    Attributes:
        train_runs: Ray's own ids of them.
    """

    settings: dict[str, Any]
    finished: bool
    train_runs: frozenset[str] = frozenset()


def earlier_run(folder: RunFolder) -> Earlier | None:
    """The earlier start of this run, if there was one.

    Raises:
        UsageError: the storage does not answer.
    """
    try:
        # Straight, without patience: a mistyped endpoint should be told at once.
        if folder.filesystem.get_file_info(folder.path(CONFIG)).type == FileType.NotFound:
            return None
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: check the storage, credentials and endpoint: {error}") from error
    events = folder.rows(EVENTS)
    return Earlier(
        folder.read_json(CONFIG),
        finished=any(row["event"] == "finish" for row in events),
        train_runs=frozenset(row["train_run"] for row in events if "train_run" in row),
    )


def check_unchanged(folder: RunFolder, earlier: Earlier, settings: dict[str, Any], names: Collection[str]) -> None:
    """Refuse a resume whose stream or model would be another.

    Args:
        names: the settings that must be what they were.

    Raises:
        UsageError: naming every changed setting with both values.
    """
    if changed := changes(earlier, settings, names):
        raise UsageError(
            f"{folder} cannot be resumed with other settings ({'; '.join(changed)}): "
            "give the earlier ones, or another --name"
        )


def changes(earlier: Earlier, settings: dict[str, Any], names: Collection[str]) -> list[str]:
    """What is not as it was, among the settings named."""
    # JSON has no tuples: compare as it will be read again.
    now = json.loads(json.dumps(settings))
    return [
        f"{name} was {earlier.settings.get(name)!r}, now {now[name]!r}"
        for name in names
        if earlier.settings.get(name) != now[name]
    ]
