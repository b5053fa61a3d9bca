"""Find the file of a job: one of raydali's own, by its name, or one of the user.

A clone has raydali's own jobs in jobs/, beside the package. A wheel carries them in raydali/job-scripts/, whose name
cannot be imported, so that a job exists only as the script that runs.
"""

import difflib
import hashlib
from pathlib import Path
from typing import Any

from raydali.errors import UsageError

PROGRAM = "RAYDALI_PROGRAM"
"""The environment variable with what the user has typed before the options of a job."""
PLAN = "RAYDALI_PLAN"
"""The environment variable by which `raydali plan` tells a job to plan: its own options, as JSON."""
typed: list[str] = []
"""The words of this process's command line, once a job has parsed it."""
_PACKAGE = Path(__file__).parents[2]
_WHEEL, _CLONE = _PACKAGE / "job-scripts", _PACKAGE.parent / "jobs"


def own_jobs() -> dict[str, Path]:
    """Return the files of raydali's own jobs by name."""
    return {file.stem: file for file in sorted((_WHEEL if _WHEEL.is_dir() else _CLONE).glob("*.py"))}


def find_job(job: str) -> Path:
    """Return the absolute path of a job's file.

    Args:
        job: the name of one of raydali's own jobs, or a file.

    Raises:
        UsageError: there is no such job; the message suggests others.
    """
    own, file = own_jobs(), Path(job).expanduser()
    if job in own:
        return own[job]
    if file.is_file():
        return file.absolute()
    if near := difflib.get_close_matches(file.stem, own, n=1, cutoff=0.75):
        raise UsageError(f"{job} is neither a job of raydali nor a file: try {near[0]}")
    raise UsageError(
        f"{job} is neither a job of raydali ({', '.join(own)}) nor a file: a task of your own begins as a copy of the "
        "nearest job by raydali new, see docs/own-data.md"
    )


def describe_job(path: Path) -> dict[str, Any]:
    """Describe a job, so that its file can be found again.

    Returns:
        {"name": "imagenet"} for one of raydali's own jobs, or an exact copy of it; else {"file": its name, "text": its
        text, "sha256": the hash of its content}.
    """
    content = path.read_bytes()
    for name, own in own_jobs().items():
        if own.read_bytes() == content:
            return {"name": name}
    return {
        "file": path.name,
        "text": content.decode(errors="replace"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
