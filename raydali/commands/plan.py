"""`raydali plan`: what a run will take, before it starts.

    raydali plan imagenet --data ~/imagenet --epochs 90 --price 2.5
    raydali plan my_job.py --data s3://bucket/pets --gpus 8 --bandwidth 40 --json plan.json

It trains for a short time as the job would, on the machines that are there, in a folder of its own.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

import tyro

from raydali.errors import UsageError
from raydali.launch.driver.job_file import PLAN, PROGRAM, find_job, own_jobs
from raydali.output import JsonFile, require_writable


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


def main(options: Plan) -> None:
    """Replace this process by the job, which plans.

    Raises:
        UsageError: there is no such job, or a value is out of its range.
    """
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
    os.environ[PROGRAM] = f"raydali plan {options.job}"
    os.execv(sys.executable, [sys.executable, str(file), *options.of_job])
