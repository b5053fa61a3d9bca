"""Find the folder of a run that a command names, and the folders of its checkpoints; no PyTorch is imported."""

import difflib
import os
import re

from raydali.data.sources.storage import reason
from raydali.errors import UsageError
from raydali.run.folder import CONFIG, EPOCHS, USUAL_STORAGE, RunFolder

MANIFEST = "manifest.json"
"""The file that makes a checkpoint complete."""


def find_run(run: str) -> RunFolder:
    """Return the folder of a run.

    Args:
        run: a path, such as ~/raydali-runs/pets, a URI, such as s3://bucket/runs/pets, or the name of a run in the
            usual storage.

    Raises:
        UsageError: it is no run, or cannot be read.
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
        why = error.__cause__
        raise UsageError(f"{run} cannot be read: check name, credentials and endpoint: {why}") from error
    try:
        if not (folder.exists(CONFIG) or folder.exists(EPOCHS)):
            raise UsageError(f"{run} is not a run, since it has no {CONFIG}: give {_others(run)}")
    except OSError as error:
        raise UsageError(f"{run} cannot be read: check name, credentials and endpoint: {reason(error)}") from error
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
    usual = os.path.expanduser(USUAL_STORAGE)  # noqa: PTH111
    names = os.listdir(usual) if os.path.isdir(usual) else []  # noqa: PTH112, PTH208
    near = difflib.get_close_matches(run.rstrip("/").rpartition("/")[2], names, n=3, cutoff=0.6)
    return " or ".join(near) or "a run's folder, or its name"


def newest_first(folder: RunFolder) -> list[str]:
    """Return the names of the folders of complete and incomplete checkpoints, from the newest to the oldest."""
    names = [name for name in folder.folders() if re.fullmatch(r"checkpoint_\d{9,}", name)]
    return sorted(names, key=step_of, reverse=True)


def newest_step(folder: RunFolder) -> int | None:
    """Return the step of the newest complete checkpoint; None if there is none."""
    return next((step_of(name) for name in newest_first(folder) if folder.exists(f"{name}/{MANIFEST}")), None)


def name_of(step: int) -> str:
    """Return the name of the folder of the checkpoint of a step."""
    return f"checkpoint_{step:09d}"


def step_of(name: str) -> int:
    """Return the step of a checkpoint by its folder's name."""
    return int(name.rpartition("_")[2])
