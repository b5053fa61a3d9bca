"""Copies of raydali's jobs with changes, trained in this process, as a user changes and trains them."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from raydali.inference.job_module import load_job
from raydali.launch.job import Job
from raydali.options.defaults import resolve
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT
from tests.support.job_ranks import train_rank
from tests.support.trained_runs import started_run

Changes = dict[str, str]
"""Texts of a job's file, each of which occurs once, and what stands in their place."""


def changed_copy(name: str, changes: Changes, folder: Path) -> Path:
    """Write a copy of a job with changes, and return its file."""
    text = (ROOT / "jobs" / f"{name}.py").read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    file = folder / f"my_{name}.py"
    file.write_text(text)
    return file


def trained_copy(file: Path, storage: Path, *, stop_at: int | None = None, **options: Any) -> RunFolder:
    """Train the job in a file with these options, besides those of its demo, and return the run's folder."""
    job, config, data = opened(file, **options)
    run = begun(job, config, data, storage)
    train_rank(job.train, config, data, run, stop_at)
    return run


def opened(file: Path, **options: Any) -> tuple[Job[Any], Any, Any]:
    """Return the job in a file, its options, these besides those of its demo, and its data."""
    job: Job[Any] = load_job(file)
    options = {"ceiling": False, **options}
    config: Any = resolve(job.config(**options) if job.demo is None else replace(job.demo, **options), {})
    return job, config, job.open_data(config)


def begun(job: Job[Any], config: Any, data: Any, storage: Path) -> RunFolder:
    """Return the folder of a run of this job, as the driver leaves it before the first step."""
    module, train = sys.modules[job.config.__module__], data.train
    facts = {"samples": len(train), "fingerprint": train.fingerprint, "first_label": getattr(train, "first_label", 0)}
    return started_run(storage, module, config, getattr(train, "classes", ()), **facts)
