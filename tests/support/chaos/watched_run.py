"""A training run in its own process, observed by its output, its events and its checkpoints."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raydali.errors import CommandError
from raydali.output import log_tail
from raydali.run.find import MANIFEST, newest_first
from raydali.run.folder import EVENTS, RunFolder

POLL_SECONDS = 0.02
GRACE_SECONDS = 400.0
"""Limit of every wait."""


class RunOverError(CommandError):
    """The run finished before what was awaited; more epochs would last longer."""


class WatchedRun:
    """A job that is started by a command line.

    Args:
        command: the job's command line, with --storage and --name.
        folder: the run's folder.
        log: file for the driver's output.
        cwd, env: working directory and environment of the driver.
    """

    def __init__(
        self, command: Sequence[str], folder: RunFolder, log: Path, *, cwd: Path, env: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._command, self._log, self._cwd, self._env = command, log, cwd, env
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the driver, or start it again after a kill."""
        with self._log.open("ab") as output:
            self._driver = subprocess.Popen(
                self._command, cwd=self._cwd, env=dict(self._env), stdout=output, stderr=output, start_new_session=True
            )

    def kill(self) -> None:
        """Kill the driver if it is running."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait()

    def exit_code(self) -> int | None:
        """Return the driver's exit code, or None if it is running or was never started."""
        return self._driver.poll() if self._driver is not None else None

    def output(self) -> str:
        """Return all output of the driver."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """Return the rows of `events.jsonl`."""
        return self.folder.rows(EVENTS)

    def checkpoints(self) -> list[tuple[int, float]]:
        """Return the step and the time (seconds since 1970) of each complete checkpoint, the newest first."""
        found = []
        for name in newest_first(self.folder):
            with suppress(FileNotFoundError):  # deleted meanwhile
                written = Path(self.folder.path(f"{name}/{MANIFEST}")).stat().st_mtime
                found.append((int(name.rpartition("_")[2]), written))
        return found

    def committed(self) -> int:
        """Return the step of the newest checkpoint; 0 if there is none."""
        return max((step for step, _ in self.checkpoints()), default=0)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait for a condition.

        Raises:
            RunOverError: the run finished before the condition was true.
            CommandError: its driver failed before, or GRACE_SECONDS have passed.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while not condition():
            code = self.exit_code()
            if code is not None and not condition():
                if code == 0:
                    raise RunOverError(f"waiting for {what}: the run was over before: raise --epochs")
                raise CommandError(f"waiting for {what}: its driver ended with {code}\n{log_tail(self._log)}")
            if time.monotonic() > deadline:
                raise CommandError(f"waiting for {what}: not within {GRACE_SECONDS:.0f} s\n{log_tail(self._log)}")
            time.sleep(POLL_SECONDS)

    def finish(self, seconds: float) -> None:
        """Wait until the run has ended.

        Raises:
            CommandError: the run failed, or took longer.
        """
        assert self._driver is not None
        try:
            code = self._driver.wait(seconds)
        except subprocess.TimeoutExpired:
            raise CommandError(f"the run does not finish within {seconds:.0f} s\n{log_tail(self._log)}") from None
        if code:
            raise CommandError(f"the run's driver ended with {code}\n{log_tail(self._log)}")
