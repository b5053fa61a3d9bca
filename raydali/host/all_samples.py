"""A pool of processes that examines all samples of a data set, with a progress display."""

import mmap
import os
import pickle
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from raydali.errors import DataError, UsageError
from raydali.host.child import Child, ChildDiedError, Children
from raydali.host.cpu_times import usable_cores
from raydali.text import plural

SAMPLES_AT_ONCE = 32
"""Number of samples that a process gets at a time, if not given."""
AHEAD = 16
"""Maximum number of submitted parts for each process."""
PART_SECONDS = 600.0
"""How long a process may take for so many samples. After that, they are examined one after the other."""
LINE_SECONDS = 10.0
"""Interval of progress lines if the output is not a terminal."""
_ALIGNMENT = 64

_Result = TypeVar("_Result")


def process_count(workers: int | None) -> int:
    """Return the number of processes for --workers; the default is one per core.

    Raises:
        UsageError: the number is less than 1.
    """
    if workers is None:
        return usable_cores()
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, not {workers}")
    return workers


def in_processes(
    examine: Callable[[range], _Result],
    samples: int,
    workers: int,
    name: str,
    take: Callable[[_Result], int],
    killed: Callable[[int, str], _Result],
    at_once: int = SAMPLES_AT_ONCE,
) -> None:
    """Examine all ids in several processes, which get parts of them, and may die of a sample.

    Args:
        examine: returns the result for some ids; its arrays go to a temporary file that all processes map.
        samples: number of samples, at least 1.
        workers: number of processes.
        name: name of the samples, for the progress on standard error.
        take: called in this process with the results, in the order of ids; returns the number of broken samples so far.
        killed: returns the result for a sample that ended its process, or on which it did not come to an end, and why.
        at_once: number of samples that a process gets at a time; after its death, each is examined by itself.

    Raises:
        DataError: the storage does not answer, or a process was killed. Errors of `examine` are raised as they are.
    """
    starts = range(0, samples, at_once)
    parts = (range(start, min(start + at_once, samples)) for start in starts)
    workers = min(workers, len(starts))
    children, slow = Children(workers, "decoder", PART_SECONDS * max(1, at_once / SAMPLES_AT_ONCE)), Child("decoder")
    with TemporaryDirectory(prefix="raydali-") as folder:

        def results(part: range, result: _Result | Exception) -> Iterator[_Result]:
            if not isinstance(result, Exception):
                yield result
                return
            if not isinstance(result, ChildDiedError):
                raise result
            for id in part:  # one after the other, to learn which one it is
                try:
                    yield slow.call(_examined, (folder, range(id, id + 1)))
                except ChildDiedError as died:
                    if died.signal == signal.SIGKILL:
                        why = "a process was killed, perhaps because memory ran out: lower --workers"
                        raise DataError(why) from died
                    yield killed(id, str(died))

        try:
            _write(folder, examine)
            with _progress(name, samples) as tell:
                submit = partial(children.submit, _examined)
                under_way = deque((part, submit((folder, part))) for part in islice(parts, AHEAD * workers))
                while under_way:
                    part, future = under_way.popleft()
                    broken = max(map(take, results(part, future.result())))
                    tell(part.stop, broken)
                    under_way.extend((part, submit((folder, part))) for part in islice(parts, 1))
        except OSError as error:
            raise DataError(f"the samples cannot be read: {error}") from error
        finally:
            children.close()
            slow.close()


def _write(folder: str, examine: Callable[[range], Any]) -> None:
    """Write a pickle for all processes, and its arrays to a separate file, so that they are in memory only once."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(examine, protocol=5, buffer_callback=buffers.append)
    with Path(folder, "arrays").open("wb") as file:
        spans = []
        for buffer in buffers:
            file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR)
            spans.append((file.tell(), buffer.raw().nbytes))
            file.write(buffer.raw())
    with Path(folder, "pickle").open("wb") as file:
        pickle.dump((pickled, spans), file)


@contextmanager
def _progress(name: str, samples: int) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on a terminal; otherwise print a line at intervals."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=samples)
            yield lambda done, broken: bar.update(task, completed=done, description=f"{name}: {broken} broken")
        return
    began = last = time.monotonic()

    def line(done: int, broken: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == samples or now - last >= LINE_SECONDS:
            last = now
            remaining = "" if done == samples else f", about {(now - began) * (samples - done) / done:.0f} s left"
            print(f"{name}: read {done} of {plural(samples, 'sample')}, {broken} broken{remaining}", file=sys.stderr)

    yield line


# Code of the child processes.


@cache
def _begun(folder: str) -> Callable[[range], Any]:
    with Path(folder, "pickle").open("rb") as file:
        pickled, spans = pickle.load(file)
    with Path(folder, "arrays").open("rb") as file:
        empty = not any(length for _, length in spans)
        arrays = memoryview(b"" if empty else mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    buffers = [arrays[begin : begin + length] for begin, length in spans]
    return pickle.loads(pickled, buffers=buffers)  # type: ignore[no-any-return]


def _examined(part: tuple[str, range]) -> Any:  # noqa: ANN401 (whatever the function returns)
    folder, ids = part
    return _begun(folder)(ids)
