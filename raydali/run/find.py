"""Find the folder of a run that a command names."""

import os

from raydali.data.sources.storage import reason
from raydali.errors import UsageError
from raydali.run.folder import CONFIG, EPOCHS, RunFolder


def find_run(run: str) -> RunFolder:
    """Return the folder of a run.

    Args:
        run: a path, such as ~/raydali-runs/pets, or a URI, such as s3://bucket/runs/pets.

    Raises:
        UsageError: it is no run, or cannot be read.
    """
    place = run.rstrip("/") if "://" in run else os.path.abspath(os.path.expanduser(run))  # noqa: PTH100, PTH111 (links stay)
    storage, _, name = place.rpartition("/")
    try:
        folder = RunFolder(storage or "/", name)
    except UsageError:
        raise UsageError(f"{run} is not a run: give a run's folder, such as ~/raydali-runs/pets") from None
    try:
        folder.path()
    except UsageError as error:
        why = error.__cause__
        raise UsageError(f"{run} cannot be read: check name, credentials and endpoint: {why}") from error
    try:
        if not (folder.exists(CONFIG) or folder.exists(EPOCHS)):
            raise UsageError(f"{run} is not a run, since it has no {CONFIG}: give a run's folder")
    except OSError as error:
        raise UsageError(f"{run} cannot be read: check name, credentials and endpoint: {reason(error)}") from error
    return folder
