"""For commands that start a job as a user would: where its script lies, and that it does not outlive the command."""

import signal
from pathlib import Path

from raydali.errors import UsageError


def job_script(name: str, command: str) -> Path:
    """The absolute path of jobs/NAME below the present folder, or of the checkout that raydali is installed from.

    Raises:
        UsageError: there is none; `command` is what should be run elsewhere then.
    """
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if (script := root / "jobs" / name).exists():
            return script
    raise UsageError(f"there is no jobs/{name} in {Path.cwd()}: run {command} in a checkout of raydali")


def heed_sigterm() -> None:
    """From now on SIGTERM is an interruption, so that what was started is ended before this process is."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
