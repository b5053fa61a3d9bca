"""For commands that start a job as a user would: its script, and an end no later than the command's."""

import signal
from pathlib import Path

from raydali.errors import UsageError


def job_script(name: str, command: str) -> Path:
    """The absolute path of jobs/NAME in the current folder, or in the checkout that raydali is installed from.

    Raises:
        UsageError: there is none; the message advises to run `command` in a checkout.
    """
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if (script := root / "jobs" / name).exists():
            return script
    raise UsageError(f"there is no jobs/{name} in {Path.cwd()}: run {command} in a checkout of raydali")


def heed_sigterm() -> None:
    """Make SIGTERM raise KeyboardInterrupt, so that child processes are ended before this one."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
