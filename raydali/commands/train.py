"""`raydali train`: run a job, which is one of raydali's own or a file.

    raydali train imagenet --data ~/pets
    raydali train my_job.py --data ~/pets

It becomes `python FILE ...options`, so that signals, exit codes and --help are the job's own.
"""

import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from raydali.errors import UsageError
from raydali.launch.driver.job_file import PROGRAM, find_job, own_jobs


@dataclass(frozen=True, kw_only=True)
class Train:
    """Run a job, such as imagenet, detection, restoration, video or grid, or the job in a file.

    `raydali train JOB --help` shows the options of a job.
    """

    job: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="JOB [OPTIONS]", help_behavior_hint="")]
    """Name of a job or a file such as my_job.py, then its options."""


def main(options: Train) -> None:
    """Replace this process by the job.

    Raises:
        UsageError: there is no such job.
    """
    job, *given = options.job or ("",)
    if not job or job.startswith("-"):
        raise UsageError(f"train needs a job before its options: {', '.join(own_jobs())}, or a file such as my_job.py")
    os.environ[PROGRAM] = f"raydali train {job}"
    os.execv(sys.executable, [sys.executable, str(find_job(job)), *given])
