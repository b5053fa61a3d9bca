"""A training run under watch: its driver, its events, its checkpoints."""

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from raydali.errors import CommandFailed
from raydali.run.checkpoints import newest_first
from raydali.run.folder import EVENTS, RunFolder
from raydali.train.checkpoint_file import MANIFEST

POLL_SECONDS = 0.02
GRACE_SECONDS = 400.0
"""For anything that is waited for."""


class WatchedRun:
    """A job as a user starts it.

    Args:
        command: the job's, with --storage and --name.
        folder: where it keeps the run.
        log: takes what the driver says.
        cwd, env: of the driver.
    """

    def __init__(
        self, command: Sequence[str], folder: RunFolder, log: Path, *, cwd: Path, env: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self._command, self._log, self._cwd, self._env = command, log, cwd, env
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the driver; after a kill the same command again."""
        with self._log.open("ab") as output:
            self._driver = subprocess.Popen(
                self._command, cwd=self._cwd, env=dict(self._env), stdout=output, stderr=output, start_new_session=True
            )

    def kill(self) -> None:
        """SIGKILL to the driver, if it is still there."""
        if self._driver is not None:
            self._driver.kill()
            self._driver.wait()

    def said(self) -> str:
        """All that the driver has said."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """The rows of `events.jsonl`."""
        return self.folder.rows(EVENTS)

    def checkpoints(self) -> list[tuple[int, float]]:
        """Of each whole checkpoint its step, and when it was (seconds since 1970); the newest first."""
        found = []
        for name in newest_first(self.folder):
            with suppress(FileNotFoundError):  # it is no longer kept
                written = Path(self.folder.path(f"{name}/{MANIFEST}")).stat().st_mtime
                found.append((int(name.rpartition("_")[2]), written))
        return found

    def committed(self) -> int:
        """Steps that the newest checkpoint covers; 0 where there is none."""
        return max((step for step, _ in self.checkpoints()), default=0)

    @property
    def over(self) -> bool:
        """Whether it has finished."""
        return self._driver is not None and self._driver.poll() == 0

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Wait until something is so.

        Raises:
            CommandFailed: the driver ended before, or it takes too long.
        """
        deadline = time.monotonic() + GRACE_SECONDS
        while not condition():
            code = self._driver.poll() if self._driver is not None else None
            if code is not None and not condition():
                why = "it was over before: raise --epochs" if code == 0 else f"its driver ended with {code}"
                raise CommandFailed(f"waiting for {what}: {why}\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise CommandFailed(f"waiting for {what}: not within {GRACE_SECONDS:.0f} s\n{self._last_words()}")
            time.sleep(POLL_SECONDS)

    def finish(self, seconds: float) -> None:
        """Wait for the end of the run.

        Raises:
            CommandFailed: it fails, or takes longer.
        """
        assert self._driver is not None
        try:
            code = self._driver.wait(seconds)
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"the run does not finish within {seconds:.0f} s\n{self._last_words()}") from None
        if code:
            raise CommandFailed(f"the run's driver ended with {code}\n{self._last_words()}")

    def _last_words(self) -> str:
        return "\n".join(self.said().splitlines()[-15:])
