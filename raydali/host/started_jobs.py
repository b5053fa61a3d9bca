"""Helpers for commands that start a job: find its script, and read the end of its log."""

from pathlib import Path

from raydali.errors import UsageError


def job_script(name: str, command: str) -> Path:
    """Return the absolute path of jobs/NAME in the current folder, or in the checkout that raydali is installed from.

    Raises:
        UsageError: the script does not exist; the message asks to run `command` in a checkout.
    """
    for root in (Path.cwd(), Path(__file__).parents[2]):
        if (script := root / "jobs" / name).exists():
            return script
    raise UsageError(f"{Path.cwd()} has no jobs/{name}: run {command} in a checkout of raydali")


def log_tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, which may be missing."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
