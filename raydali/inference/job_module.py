"""Finds a run and its job, the `JOB` at the top level of the job's file, see launch/job.py.

A run keeps the text of a job of the user, but it is not executed: the file must be at hand.
"""

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raydali.errors import UsageError
from raydali.launch.driver.job_file import find_job
from raydali.launch.job import Job
from raydali.run.find import find_run
from raydali.run.folder import RunFolder
from raydali.run.model_file import MODEL, read_model
from raydali.text import error_line

PREFIX = "raydali_job_"
"""Begins the names of the modules of jobs, which cannot be imported by name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FoundRun:
    """A run and its job.

    Attributes:
        folder: the run's.
        facts: its model.json; empty if the file was removed.
        job: the job that trained it, or the one that the user gives. All that concerns its data, network and
            evaluation is taken from there.
        file: of the job.
        unchanged: whether the file is still what it was when the run began; None: the run does not say.
    """

    folder: RunFolder
    facts: Mapping[str, Any]
    job: Job[Any]
    file: Path
    unchanged: bool | None


def found_run(run: str, job: str | None = None) -> FoundRun:
    """Find a run and its job, without PyTorch.

    Args:
        run: its folder, a path or a URI.
        job: a job's name or file, in place of the run's own.

    Raises:
        UsageError: it is no run, or its job cannot be found or imported, or lacks something.
    """
    folder = find_run(run)
    model = read_model(folder)
    facts, classes = model.get("job", {}), model.get("classes", [])
    if not isinstance(facts, dict) or not (isinstance(classes, list) and {*map(type, classes)} <= {str}):
        raise UsageError(f"{folder}/{MODEL} has another form than raydali writes: remove it, and give --job")
    path = find_job(job) if job is not None else _own_job(str(folder), facts)
    sha256 = facts.get("sha256")
    unchanged = sha256 and hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    if unchanged is False:
        _log.warning("%s has changed since the run %s", path, folder)
    return FoundRun(folder=folder, facts=model, job=load_job(path), file=path, unchanged=unchanged)


def _own_job(run: str, facts: Mapping[str, Any]) -> Path:
    if "name" in facts:
        return find_job(facts["name"])
    name = facts.get("file")
    if name is None:
        raise UsageError(f"{run} has no job in {MODEL}: give --job, such as imagenet")
    if not Path(name).is_file():
        raise UsageError(f"{run} was trained by {name}, which is not in this folder: give --job FILE")
    return Path(name).absolute()


def load_job(path: Path) -> Job[Any]:
    """Return the job that a file has at its top level; the file can import modules beside it, and in this folder.

    Raises:
        UsageError: it cannot be imported, or has no job.
    """
    sys.path[:0] = [str(Path.cwd()), str(path.parent)]
    name = f"{PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--job {path} is no Python file: give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the job {path} cannot be imported ({error_line(repr(error))}): correct it") from error
    job = getattr(module, "JOB", None)
    if not isinstance(job, Job):
        raise UsageError(f"the job {path} lacks JOB = Job(...) at its top level: define it as jobs/imagenet.py does")
    return job
