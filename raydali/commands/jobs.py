"""`raydali new`, `train` and `plan`: copy a job to change it, run it, or say what a run will take before it starts.

    raydali new imagenet my_job.py
    raydali train my_job.py --data ~/pets
    raydali plan imagenet --data ~/imagenet --epochs 90 --price 2.5
    raydali plan my_job.py --data s3://bucket/pets --gpus 8 --bandwidth 40 --json plan.json

A job is one of raydali's own or a file. `train` and `plan` become `python FILE ...options`, so that signals, exit codes
and --help are the job's own. A plan trains for a short time as the job would, on the machines that are there, in a
folder of its own.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from raydali.errors import UsageError
from raydali.launch.driver.job_file import PLAN, PROGRAM, find_job, own_jobs
from raydali.output import JsonFile, require_writable


@dataclass(frozen=True, kw_only=True)
class New:
    """Copy a job to a file of your own, which runs as it is."""

    job: tyro.conf.Positional[str]
    """Name of a job, such as imagenet, detection, restoration, segmentation, video or grid, or a file."""
    file: tyro.conf.Positional[str]
    """File to write, such as my_job.py. It must not exist."""


@dataclass(frozen=True, kw_only=True)
class Train:
    """Run a job, such as imagenet, detection, restoration, segmentation, video or grid, or the job in a file.

    `raydali train JOB --help` shows the options of a job.
    """

    job: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="JOB [OPTIONS]", help_behavior_hint="")]
    """Name of a job or a file such as my_job.py, then its options."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Train for a short time, and say what the whole run will take: time, goodput, energy, money, memory and disk.

    All other options are the job's; --price is the price of a GPU's hour.
    """

    job: tyro.conf.Positional[str] = ""
    """Name of a job, such as imagenet, or a file such as my_job.py."""
    seconds: float = 45
    """Seconds of training and validation, after the warm-up steps of every start: from 5 to 90."""
    gpus: int = 8
    """Largest number of GPUs to show; those that are not there are estimated."""
    bandwidth: float | None = None
    """GB/s of an all-reduce between GPUs, for numbers of GPUs that were not measured. Default: as measured, with one
    GPU unlimited."""
    json: JsonFile = None
    of_job: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Options of the job, as on its command line."""


def main(options: New | Train | Plan) -> None:
    """Copy a job, or replace this process by it.

    Raises:
        UsageError: there is no such job, a value is out of its range, or the file cannot be written.
    """
    if isinstance(options, New):
        _copy(options)
    elif isinstance(options, Plan):
        _plan(options)
    else:
        job, *arguments = options.job or ("",)
        if not job or job.startswith("-"):
            others = f"{', '.join(own_jobs())}, or a file such as my_job.py"
            raise UsageError(f"train needs a job before its options: {others}")
        _become(find_job(job), f"raydali train {job}", arguments)


def _become(job: Path, program: str, arguments: Sequence[str]) -> None:
    os.environ[PROGRAM] = program
    os.execv(sys.executable, [sys.executable, str(job), *arguments])


def _plan(options: Plan) -> None:
    if not options.job:
        raise UsageError(f"plan needs a job: {', '.join(own_jobs())}, or a file such as my_job.py")
    if not 5 <= options.seconds <= 90:
        raise UsageError(f"--seconds must be from 5 to 90, not {options.seconds:g}")
    if options.gpus < 1:
        raise UsageError(f"--gpus must be at least 1, not {options.gpus}")
    if options.bandwidth is not None and options.bandwidth <= 0:
        raise UsageError(f"--bandwidth must be above 0 GB/s, not {options.bandwidth:g}")
    if options.json != "-":
        require_writable("--json", options.json)
    file = find_job(options.job)
    own = {name: value for name, value in asdict(options).items() if name not in ("job", "of_job")}
    os.environ[PLAN] = json.dumps(own | {"since": time.time()})
    _become(file, f"raydali plan {options.job}", options.of_job)


def _copy(options: New) -> None:
    """Write the copy, whose examples of commands name its file, and print the command that runs it."""
    source, target = find_job(options.job), Path(options.file).expanduser()
    if target.is_dir():
        raise UsageError(f"{options.file} is a folder: give a file in it, such as {target / 'my_job.py'}")
    if target.suffix != ".py":
        raise UsageError(f"{options.file} must end with .py: give {options.file}.py")
    text = source.read_text().replace(f"python jobs/{source.name}", f"python {target.name}")
    try:
        with target.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{options.file} exists: give another file, or remove it") from None
    except FileNotFoundError:
        folder = target.parent  # /proc, for one, exists and takes no files
        why = "takes no files: give another one" if folder.exists() else f"does not exist: mkdir -p {folder}"
        raise UsageError(f"the folder {folder} {why}") from None
    except OSError as error:
        raise UsageError(f"{options.file} cannot be written: {error.strerror}; give another file") from error
    print(f"{options.file} is a copy of the job {source.stem}: raydali train {options.file}")
