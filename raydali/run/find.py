"""Finds out whether a folder is a run, and which checkpoints it has. No PyTorch is imported."""

import difflib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pyarrow.fs import FileType

from raydali.data.read.storage import reason
from raydali.errors import UsageError
from raydali.run.events import FirstCheckpoint, RunFinished
from raydali.run.folder import CONFIG, EVENTS, FORM, USUAL_STORAGE, RunFolder
from raydali.run.model_file import best_file

MANIFEST, REFUSED = "manifest.json", "refused.json"
"""The file that makes a checkpoint complete, and the name that it gets if the checkpoint cannot be used."""
KEPT = 3
"""Number of the newest checkpoints to keep; the oldest is deleted after the next one is written."""
FolderKind = Literal["empty", "run", "stuck", "foreign"]
_WEIGHTS = ".safetensors", ".pt", ".pth"


def look_at(folder: RunFolder) -> tuple[FolderKind, str]:
    """Return what a folder is, and why it is stuck or foreign. Every start and every command asks before it writes.

    An empty one has nothing that a new run would replace. A run can go on, or has finished; without a checkpoint, it
    begins anew. A stuck run has lost its checkpoints. A foreign folder has weights, and is no run.

    Raises:
        UsageError: the storage cannot be read, or a line of `events.jsonl` is broken.
    """
    try:
        # Without retry, so that a mistyped endpoint is reported at once.
        is_run = folder.filesystem.get_file_info(folder.path(CONFIG)).type != FileType.NotFound
        checkpoints = newest_first(folder)
        best = [*filter(None, [best_file(folder)])]
        if not is_run:
            weights = [*best, *checkpoints, *(name for name in folder.files("") if name.endswith(_WEIGHTS))]
            why = f"it has {weights[0]}, but no {CONFIG}" if weights else lost_checkpoint(folder)
            return ("foreign" if why else "empty"), why
        if any(folder.exists(f"{name}/{MANIFEST}") for name in checkpoints):
            return "run", ""
        why = lost_checkpoint(folder) or (f"it has {best[0]}, but no checkpoint" if best else "")
        has_finished = any(row["event"] == RunFinished.event for row in folder.rows(EVENTS))
        return ("stuck", why) if why and not has_finished else ("run", "")
    except OSError as error:
        raise UsageError(f"{folder} cannot be read: check name, credentials and endpoint: {reason(error)}") from error


def read_settings(folder: RunFolder) -> dict[str, Any]:
    """Return the contents of a run's config.json.

    Raises:
        UsageError: it is broken, or has another form.
    """
    try:
        settings = folder.read_json(CONFIG)
    except ValueError as error:
        settings = f"{error}"
    if not isinstance(settings, dict):
        raise UsageError(
            f"{folder}/{CONFIG} is {'empty' if not folder.read(CONFIG).strip() else 'broken'}: restore it, or delete "
            "it if the run has no checkpoint"
        )
    if (form := settings.get("form")) != FORM:
        raise UsageError(
            f"{folder}/{CONFIG} has {f'form {form!r}' if form is not None else 'no form'}, and this version of raydali "
            f"reads form {FORM}: use the version that began the run"
        )
    return settings


def lost_checkpoint(folder: RunFolder) -> str:
    """Return a clause about a lost checkpoint of a run that has no complete one; empty if it has never saved one."""
    names = newest_first(folder)
    steps = [row["step"] for row in folder.rows(EVENTS) if row["event"] == FirstCheckpoint.event]
    if not steps and not any(folder.exists(f"{name}/{REFUSED}") for name in names):
        return ""
    return f"its checkpoints are lost or incomplete, such as {names[0] if names else name_of(steps[-1])}"


def find_run(run: str) -> RunFolder:
    """Return the folder of a run.

    Args:
        run: a path, such as ~/raydali-runs/pets, a URI, such as s3://bucket/runs/pets, or the name of a run in the
            usual storage.

    Raises:
        UsageError: it is no run, cannot be read, or is of another version, see `read_settings`.
    """
    place = place_of(run)
    storage, _, name = place.rpartition("/")
    try:
        folder = RunFolder(storage or "/", name)
    except UsageError:
        raise UsageError(f"{run} is not a run: give a run's folder, such as {USUAL_STORAGE}/pets") from None
    try:
        folder.path()
    except UsageError as error:
        raise UsageError(f"{run} cannot be read: check name, credentials and endpoint: {error.__cause__}") from error
    kind, why = look_at(folder)
    if kind in ("empty", "foreign"):
        raise UsageError(f"{run} is not a run, since {why or f'it has no {CONFIG}'}: give {_others(run)}")
    read_settings(folder)
    return folder


def place_of(run: str) -> str:
    """Return the absolute path or URI of a run; of a bare name that is no path, its folder in the usual storage."""
    if "://" in run:
        return run.rstrip("/")
    usual = os.path.expanduser(f"{USUAL_STORAGE}/{run}")  # noqa: PTH111
    if run and "/" not in run and not os.path.exists(run) and os.path.exists(f"{usual}/{CONFIG}"):  # noqa: PTH110
        return usual
    return os.path.abspath(os.path.expanduser(run))  # noqa: PTH100, PTH111 (links stay)


def _others(run: str) -> str:
    """Return what may have been meant instead."""
    names = [path.parent.name for path in Path(USUAL_STORAGE).expanduser().glob(f"*/{CONFIG}")]
    near = difflib.get_close_matches(run.rstrip("/").rpartition("/")[2], names, n=3, cutoff=0.6)
    return " or ".join(near) or "a run's folder, or its name"


def newest_first(folder: RunFolder) -> list[str]:
    """Return the names of the folders of complete and incomplete checkpoints, from the newest to the oldest."""
    names = [name for name in folder.folders() if re.fullmatch(r"checkpoint_\d{9,}", name)]
    return sorted(names, key=step_of, reverse=True)


def complete_ones(folder: RunFolder) -> Iterator[str]:
    """Yield the names of the folders of complete checkpoints, from the newest to the oldest."""
    return (name for name in newest_first(folder) if folder.exists(f"{name}/{MANIFEST}"))


def newest_step(folder: RunFolder) -> int | None:
    """Return the step of the newest complete checkpoint; None if there is none."""
    return next(map(step_of, complete_ones(folder)), None)


def name_of(step: int) -> str:
    """Return the name of the folder of the checkpoint of a step."""
    return f"checkpoint_{step:09d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint by its folder's name."""
    return int(name.rpartition("_")[2])
