"""All samples of a data set in many processes, with what a user sees of it meanwhile."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

from raydali.errors import DataError, UsageError
from raydali.measure.host import usable_cores

SAMPLES_AT_ONCE = 32
"""That a process is given."""
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""

_Found = TypeVar("_Found")


def process_count(workers: int | None) -> int:
    """What --workers asks for. Default: one for each core.

    Raises:
        UsageError: fewer than one.
    """
    if workers is None:
        return usable_cores()
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, not {workers}")
    return workers


def in_processes(
    examine: Callable[[range], _Found], samples: int, workers: int, name: str, take: Callable[[_Found], int]
) -> None:
    """Have all ids examined, some at once, in as many processes.

    Args:
        examine: what is found of these ids; pickled once for each process.
        samples: how many there are, at least 1.
        workers: processes.
        name: of the samples, in the progress on standard error.
        take: gets what was found here, in the order of ids, and says how many samples are broken so far.

    Raises:
        DataError: the storage does not answer, or a process was killed; or what `examine` raises.
    """
    parts = [range(begin, min(begin + SAMPLES_AT_ONCE, samples)) for begin in range(0, samples, SAMPLES_AT_ONCE)]
    # No fork: those who speak with object stores have threads.
    with ProcessPoolExecutor(min(workers, len(parts)), get_context("spawn"), _begin, (examine,)) as processes:
        try:
            with _progress(name, samples) as tell:
                for part, found in zip(parts, processes.map(_examined, parts), strict=True):
                    tell(part.stop, take(found))
        except OSError as error:
            raise DataError(f"cannot go on: {error}") from error
        except BrokenProcessPool as error:
            raise DataError("cannot go on: a process was killed; if memory ran out, lower --workers") from error
        finally:
            processes.shutdown(cancel_futures=True)


@contextmanager
def _progress(name: str, samples: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; elsewhere a line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=samples)
            yield lambda done, broken: bar.update(task, completed=done, description=f"{name}: {broken} broken")
        return
    last = time.monotonic()

    def line(done: int, broken: int) -> None:
        nonlocal last
        if done == samples or time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"{name}: {done} of {samples} read, {broken} broken", file=sys.stderr)

    yield line


# In the processes

_examine: Callable[[range], Any]


def _begin(examine: Callable[[range], Any]) -> None:
    global _examine
    _examine = examine
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """One that waits for work would outlive a parent that was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _examined(ids: range) -> Any:
    return _examine(ids)
