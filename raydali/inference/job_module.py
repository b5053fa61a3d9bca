"""Load the job of a run as a module: it says how the model is built and what its inputs are.

    Config                           the options of the run
    build_model(config, classes)     the model, with random weights
    val_pipeline(config)             the pipeline of validation samples

A run keeps the text of a job of the user, but it is not executed: the file must be at hand.
"""

import hashlib
import importlib.util
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from raydali.errors import UsageError
from raydali.launch.driver.job_file import find_job
from raydali.text import error_line

NEEDED = "Config", "build_model", "val_pipeline"
PREFIX = "raydali_job_"
"""Begins the names of the modules of jobs, which cannot be imported by name."""

_log = logging.getLogger(__name__)


def job_module(run: str, facts: Mapping[str, Any], given: str | None) -> ModuleType:
    """Return the module of a run's job.

    Args:
        run: the run, for messages.
        facts: `job` of its model.json, see `launch.driver.job_file.describe_job`; empty for runs of earlier versions.
        given: a job's name or file, in place of the run's own.

    Raises:
        UsageError: it cannot be found or imported, or lacks something.
    """
    path = find_job(given) if given is not None else _own_job(run, facts)
    known = facts.get("sha256")
    if known is not None and hashlib.sha256(path.read_bytes()).hexdigest() != known:
        _log.warning("%s has changed since the run %s", path, run)
    sys.path[:0] = [str(Path.cwd()), str(path.parent)]
    return _imported(path)


def _own_job(run: str, facts: Mapping[str, Any]) -> Path:
    if "name" in facts:
        return find_job(facts["name"])
    name = facts.get("file")
    if name is None:
        raise UsageError(f"{run} is of an earlier version, and has no job in model.json: give --job, such as imagenet")
    if not Path(name).is_file():
        raise UsageError(f"{run} was trained by {name}, which is not in this folder: give --job FILE")
    return Path(name).absolute()


def _imported(path: Path) -> ModuleType:
    name = f"{PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"--job {path} is no Python file: give one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UsageError(f"the job {path} cannot be imported ({error_line(repr(error))[:60]}): correct it") from error
    if lacking := [each for each in NEEDED if not hasattr(module, each)]:
        raise UsageError(f"the job {path} lacks {' and '.join(lacking)}: define them as jobs/imagenet.py does")
    return module
