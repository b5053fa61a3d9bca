"""The folders of a run's checkpoints. To name them needs no PyTorch, whose import takes seconds."""

import re

from raydali.run.folder import RunFolder

MANIFEST = "manifest.json"
"""The file that makes a checkpoint complete."""


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
