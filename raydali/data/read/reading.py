"""Reading files: timers of what a loader waits for, and calls to a storage that are repeated while it does not answer.

Checkpoints and a run's folder repeat their calls in the same way.
"""

import errno
import logging
import mmap
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

import numpy as np

Cause = Literal["storage", "python", "cpu decode", "gpu decode"]
"""Causes of a loader's waits: reading files; Python; decoding and further processing of pixels, on either device."""
SECONDS = 60.0
"""How long a call is repeated after its first failure."""
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
"""Errors of a failing disk or file server: they may pass, and no single file is to blame."""

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger(__name__)


class WaitTimer:
    """Seconds that each cause blocked the consumer of batches; for one thread.

    A nested cause is not counted in the outer one.
    """

    def __init__(self) -> None:
        self.seconds: dict[Cause, float] = {}
        self._inner = [0.0]

    @contextmanager
    def by(self, split: Callable[[float], dict[Cause, float]]) -> Iterator[None]:
        """Attribute the time of the `with` block, without nested ones, to causes as `split` divides its seconds."""
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            whole = time.perf_counter() - began
            for cause, seconds in split(max(0.0, whole - self._inner.pop())).items():
                self.seconds[cause] = self.seconds.get(cause, 0.0) + seconds
            self._inner[-1] += whole

    def on(self, cause: Cause) -> AbstractContextManager[None]:
        """Attribute the time of the `with` block to one cause."""
        return self.by(lambda seconds: {cause: seconds})


def shares(seconds: float, parts: Mapping[Cause, float]) -> dict[Cause, float]:
    """Divide seconds in proportion to these parts."""
    whole = sum(parts.values()) or 1.0
    return {cause: seconds * part / whole for cause, part in parts.items()}


class PythonTime:
    """Time of pipelines' Python in all threads of this process, in which the training thread could run no Python.

    Attributes:
        seconds: CPU seconds in total; waiting for a file or for the interpreter does not count.
        in_graphs: seconds of the clock in functions of graphs, see `timed`.
    """

    def __init__(self) -> None:
        self.seconds = self.in_graphs = 0.0
        self._lock = threading.Lock()

    @contextmanager
    def running(self, *, in_graph: bool = False) -> Iterator[None]:
        """Count the time of this thread in the `with` block."""
        began, at = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            seconds, passed = time.thread_time() - began, time.perf_counter() - at
            with self._lock:
                self.seconds += seconds
                self.in_graphs += passed * in_graph


PYTHON = PythonTime()


def timed(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function for `fn.python_function` of a graph, whose time the verdict then knows as Python's."""

    @wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> T:
        with PYTHON.running(in_graph=True):
            return function(*args, **options)

    return call


class _Reading(threading.local):
    seconds = 0.0


_reading = _Reading()


@contextmanager
def reading() -> Iterator[None]:
    """Count the time of the `with` block as reading files."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _reading.seconds += time.perf_counter() - began


def reading_seconds() -> float:
    """Total seconds of this thread in `reading`."""
    return _reading.seconds


def is_transient(error: BaseException) -> bool:
    """Return whether the error of a storage is transient, unlike a refusal or a missing file.

    The innermost OSError of its causes decides. One without an errno is treated as an object store's.
    """
    error = _innermost(error)
    if not isinstance(error, OSError):
        return False
    if (number := errno_of(error)) is not None:
        return number in STORAGE_ERRNOS
    return not isinstance(error, FileNotFoundError | PermissionError) and not _REFUSALS.search(str(error))


class FolderAwayError(OSError):
    """The folder of a file that was indexed is missing: its storage is not mounted, or it was moved."""


def folder_away(error: BaseException) -> str | None:
    """Return the missing folder of a local file that was not found; None if the file alone is missing.

    The storage of such a folder is not mounted, or the folder is moved. A file that is there again counts, too.
    """
    error = _innermost(error)
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str | bytes):
        return None
    path = os.path.abspath(os.fsdecode(error.filename).removeprefix("file:"))  # FFmpeg has this prefix
    folder = os.path.dirname(path)
    # The file is looked for last: the folder may have come back meanwhile, with the file.
    return folder if not os.path.exists(folder) or os.path.exists(path) else None


def errno_of(error: Exception) -> int | None:
    """An error's errno, or the one in its text if only that is left."""
    number = getattr(error, "errno", None)
    match = re.match(r"\[Errno (\d+)\]", str(error))
    return int(match[1]) if number is None and match else number


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


def _innermost(error: BaseException) -> BaseException:
    """The innermost OSError among an error and its causes, or the error itself."""
    return next((cause for cause in reversed([*causes(error)]) if isinstance(cause, OSError)), error)


@dataclass(frozen=True, slots=True)
class Outage:
    """A period in which a storage did not answer and calls were repeated.

    Attributes:
        storage: its name in messages: a folder or a bucket.
        reason: the error of the first call, one line.
        seconds: from the first failure until the calls succeeded or gave up.
    """

    storage: str
    reason: str
    seconds: float


class _Outages:
    """The outages of this process. Threads that wait for one storage at the same time are in the same outage."""

    def __init__(self) -> None:
        self._reset_after_fork()
        # A forked process has none of the threads that wait, and may not use a lock that one of them holds.
        os.register_at_fork(after_in_child=self._reset_after_fork)
        # Shared with forked processes: their retries count as progress of this one.
        self.retries = np.frombuffer(mmap.mmap(-1, 8), np.int64)

    def _reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, tuple[int, float, str]] = {}
        self._over: deque[Outage] = deque(maxlen=_KEPT_OUTAGES)

    def begin(self, storage: str, reason: str) -> bool:
        """Count one more waiting thread; returns whether it is the first."""
        with self._lock:
            waiting, since, first = self._waiting.get(storage, (0, time.monotonic(), reason))
            self._waiting[storage] = waiting + 1, since, first
        return not waiting

    def end(self, storage: str) -> None:
        """Count one waiting thread less."""
        with self._lock:
            waiting, since, reason = self._waiting.pop(storage)
            if waiting > 1:
                self._waiting[storage] = waiting - 1, since, reason
            else:
                self._over.append(Outage(storage, reason, round(time.monotonic() - since, 3)))

    def add(self, outages: Iterable[Outage]) -> None:
        """Add the outages of another process."""
        self._over.extend(outages)

    def take(self) -> list[Outage]:
        """Return the outages that ended since the last call."""
        with self._lock:
            over = list(self._over)
            self._over.clear()
        return over

    def __len__(self) -> int:
        """The number of outages that ended since `take`."""
        return len(self._over)


OUTAGES = _Outages()


def retries() -> int:
    """The number of calls that this process and its forks have repeated; it grows while they wait for a storage."""
    return int(OUTAGES.retries[0])


class Backoff:
    """The pauses between attempts while a storage does not answer: they double, for SECONDS in total.

    Args:
        storage: its name in warnings; the same on every rank, so that the driver prints it once.
        warn: called once for each outage.
    """

    def __init__(self, storage: str, warn: Callable[[str], None] = _log.warning) -> None:
        self._storage, self._warn = storage, warn
        self._failures, self._deadline = 0, 0.0

    def pause(self, error: BaseException) -> bool:
        """Wait before the next attempt; return False at once if the time is over."""
        if not self._failures:
            self._deadline = time.monotonic() + SECONDS
            if OUTAGES.begin(self._storage, short(error)):
                self._warn(f"{self._storage} does not answer ({short(error)}): trying again for up to {SECONDS:g} s")
        # Random, so that many workers that failed at once do not retry at once.
        pause = min(FIRST_PAUSE * 2**self._failures, LONGEST_PAUSE) * random.uniform(0.7, 1.0)
        self._failures += 1
        OUTAGES.retries[0] += 1
        if time.monotonic() + pause > self._deadline:
            return False
        time.sleep(pause)
        return True

    def end(self) -> None:
        """End the outage, since the work succeeded or gave up: the next failure begins a new one."""
        if self._failures:
            OUTAGES.end(self._storage)
            self._failures = 0


def with_retry(
    call: Callable[[], T],
    storage: str,
    warn: Callable[[str], None] = _log.warning,
    worth: Callable[[Exception], bool] = is_transient,
) -> T:
    """Return the result of a call, which is repeated for SECONDS while it fails.

    Args:
        call: does one request.
        storage: its name, see `Backoff`.
        warn: takes a line, see `Backoff`.
        worth: whether an error is worth a repetition.

    Raises:
        Exception: the last one.
    """
    backoff = Backoff(storage, warn)
    try:
        while True:
            try:
                return call()
            except Exception as error:
                if not worth(error) or not backoff.pause(error):
                    raise
    finally:
        backoff.end()


def short(error: BaseException) -> str:
    """A storage's error without the name of the file, so that it is the same on every rank."""
    error = _innermost(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, FolderAwayError):
        return str(error)
    match = _ANSWERS.search(str(error))
    return match[0] if match else type(error).__name__
