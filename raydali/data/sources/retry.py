"""Calls to a storage that are repeated while it does not answer: of data, checkpoints and a run's folder."""

import errno
import logging
import mmap
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

SECONDS = 60.0
"""How long a call is repeated, from its first failure on."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
_KEPT_OUTAGES = 100
_ANSWERS = re.compile(r"AWS Error \w+|HTTP status \d+|curlCode: \d+|fn\.io\.file\.read")
_REFUSALS = re.compile(r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET|HTTP status 40[0-7]")
STORAGE_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ENODEV", "ENXIO", "EBUSY", "EAGAIN", "EMFILE", "ENFILE", "ENOMEM", "EREMOTEIO"),
        *("ENOTCONN", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EHOSTDOWN", "EHOSTUNREACH"),
        *("ENETDOWN", "ENETUNREACH", "ETIMEDOUT", "EPIPE"),
    )
    if hasattr(errno, name)
}
"""Errors of a disk or a file server that fails: they say nothing of a single file, and may pass."""

T = TypeVar("T")

_log = logging.getLogger(__name__)


def is_transient(error: BaseException) -> bool:
    """Return whether the error of a storage may pass: not where it refuses, or has no such file.

    The innermost OSError of its causes decides. One without an errno is taken for an object store's.
    """
    error = _innermost(error)
    if not isinstance(error, OSError):
        return False
    if (number := errno_of(error)) is not None:
        return number in STORAGE_ERRNOS
    return not isinstance(error, FileNotFoundError | PermissionError) and not _REFUSALS.search(str(error))


def errno_of(error: Exception) -> int | None:
    """An error's errno; what its text says where that is all that is left of it."""
    number = getattr(error, "errno", None)
    said = re.match(r"\[Errno (\d+)\]", str(error))
    return int(said[1]) if number is None and said else number


def _innermost(error: BaseException) -> BaseException:
    """The last OSError of an error and its causes; itself where there is none."""
    cause: BaseException | None = error
    while cause is not None:
        error, cause = (cause if isinstance(cause, OSError) else error), cause.__cause__
    return error


@dataclass(frozen=True, slots=True)
class Outage:
    """A time in which a storage did not answer and calls were repeated.

    Attributes:
        storage: its name for people: a folder, a bucket.
        reason: what the first call ended with, one line.
        seconds: from the first failure until the calls succeeded, or were given up.
    """

    storage: str
    reason: str
    seconds: float


class _Outages:
    """Those of this process. Threads that wait for one storage at the same time are in the same outage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[int, float, str]] = {}
        self._over: deque[Outage] = deque(maxlen=_KEPT_OUTAGES)
        # Shared with forked processes, whose retries are this one's progress too.
        self.retries = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def begin(self, storage: str, reason: str) -> bool:
        """Note that one more waits; whether it is the first."""
        with self._lock:
            waiting, since, first = self._waiting.get(storage, (0, time.monotonic(), reason))
            self._waiting[storage] = waiting + 1, since, first
        return not waiting

    def end(self, storage: str) -> None:
        """Note that one of those does not wait any more."""
        with self._lock:
            waiting, since, reason = self._waiting.pop(storage)
            if waiting > 1:
                self._waiting[storage] = waiting - 1, since, reason
            else:
                self._over.append(Outage(storage, reason, round(time.monotonic() - since, 3)))

    def add(self, outages: Iterable[Outage]) -> None:
        """Note those of another process."""
        self._over.extend(outages)

    def take(self) -> list[Outage]:
        """Those that are over since the last call."""
        with self._lock:
            over = list(self._over)
            self._over.clear()
        return over

    def __len__(self) -> int:
        """How many are over since `take`."""
        return len(self._over)


OUTAGES = _Outages()


def retries() -> int:
    """How many calls this process and its forks have repeated: what grows while they wait for a storage."""
    return int(OUTAGES.retries[0])


class Patience:
    """The pauses of work that is repeated while a storage does not answer: they double, for SECONDS in all.

    Args:
        storage: its name in warnings; the same on every rank, so that the driver says it once.
        warn: hears once of an outage.
    """

    def __init__(self, storage: str, warn: Callable[[str], None] = _log.warning) -> None:
        self._storage, self._warn = storage, warn
        self._failures, self._deadline = 0, 0.0

    def pause(self, error: BaseException) -> bool:
        """Wait before the next attempt; or, where the time is over, return False at once."""
        if not self._failures:
            self._deadline = time.monotonic() + SECONDS
            if OUTAGES.begin(self._storage, short(error)):
                self._warn(f"{self._storage} does not answer ({short(error)}): trying again for up to {SECONDS:g} s")
        # Of many workers that failed at once, not all should come again at once.
        pause = min(FIRST_PAUSE * 2**self._failures, LONGEST_PAUSE) * random.uniform(0.7, 1.0)
        self._failures += 1
        OUTAGES.retries[0] += 1
        if time.monotonic() + pause > self._deadline:
            return False
        time.sleep(pause)
        return True

    def end(self) -> None:
        """Say that the work succeeded, or is given up: the next failure begins a new outage."""
        if self._failures:
            OUTAGES.end(self._storage)
            self._failures = 0


def with_retry(
    call: Callable[[], T],
    storage: str,
    warn: Callable[[str], None] = _log.warning,
    worth: Callable[[Exception], bool] = is_transient,
) -> T:
    """Return what the call returns, and repeat it for SECONDS while it fails.

    Args:
        storage, warn: as of `Patience`.
        worth: after which errors to repeat it.

    Raises:
        Exception: the last one.
    """
    patience = Patience(storage, warn)
    try:
        while True:
            try:
                return call()
            except Exception as error:
                if not worth(error) or not patience.pause(error):
                    raise
    finally:
        patience.end()


def short(error: BaseException) -> str:
    """Return what a storage answered, without the name of the file: the same on every rank."""
    error = _innermost(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = _ANSWERS.search(str(error))
    return found[0] if found else type(error).__name__
