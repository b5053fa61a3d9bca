"""`raydali new` and `raydali train`: copy a job, to change it, and run a job, which is one of raydali's own or a file.

    raydali new imagenet my_job.py
    raydali train my_job.py --data ~/pets

`train` becomes `python FILE ...options`, so that signals, exit codes and --help are the job's own.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from raydali.errors import UsageError
from raydali.launch.driver.job_file import PROGRAM, find_job, own_jobs


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


def main(options: New | Train) -> None:
    """Copy a job, or replace this process by it.

    Raises:
        UsageError: there is no such job, or the file cannot be written.
    """
    if isinstance(options, New):
        _copy(options)
        return
    job, *arguments = options.job or ("",)
    if not job or job.startswith("-"):
        raise UsageError(f"train needs a job before its options: {', '.join(own_jobs())}, or a file such as my_job.py")
    os.environ[PROGRAM] = f"raydali train {job}"
    os.execv(sys.executable, [sys.executable, str(find_job(job)), *arguments])


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
