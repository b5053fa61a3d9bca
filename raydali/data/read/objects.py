"""Reads many objects of buckets at the same time, in processes of their own where there are cores for them.

    the parts of a batch --> a group for each process --> its threads --> the cache of the node, or the bucket

On each object a thread of Python waits several times, and so does the loop that takes the batches, for the interpreter.
On 16 cores, a loader that reads within its own process had 5,300 images/s, where files of a disk came at 19,000.
"""

import logging
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache, partial
from itertools import chain
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from raydali.data.read import storage
from raydali.data.read.read_counts import COUNTS, Counts
from raydali.data.read.storage import ObjectPart
from raydali.host.child import ChildDiedError, Children
from raydali.host.cpu_times import usable_cores

if TYPE_CHECKING:
    from raydali.data.read.node_cache.node_cache import NodeCache

_PROCESSES = range(4, 13)
"""Numbers of processes that are worth their cost; the processes of all ranks of a node get two thirds of its cores."""
_THREADS = 256
"""Threads of a process that read: four batches are read ahead at the same time."""
_TOGETHER = 4
"""Objects that a thread of this process reads one after the other: to pass each one alone takes as long as reading."""


_Answer = tuple[list[Any], Counts, list[logging.LogRecord]]
"""A process returns contents as buffers, which arrive as memoryviews, and its counts and its warnings since."""
_make_cache: bytes | None = None
"""The pickled function that returns the cache of a process."""


@contextmanager
def through_cache(make: "Callable[[], NodeCache]") -> Iterator[None]:
    """Read samples through a cache in the `with` block. Each process makes its own: they share no locks or connections.

    Args:
        make: returns the cache of a process; it can be pickled.
    """
    global _make_cache
    _make_cache = pickle.dumps(make)
    made = _cache_of(_make_cache, os.getpid())
    try:
        yield
    finally:
        pickled, _make_cache = _make_cache, None
        _cache_of.cache_clear()
        made.close()
        if processes := _started.pop(_key(), None):
            processes.close(_close_cache, pickled)


@cache
def _cache_of(make: bytes, _process: int) -> "NodeCache":
    return pickle.loads(make)()  # type: ignore[no-any-return]


def read_objects(parts: Sequence[ObjectPart]) -> list[memoryview | OSError]:
    """Return the contents of parts of objects, read at the same time, or the errors of `storage.fetch`.

    They may come from a cache, so they must be objects that do not change.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # Ray Train sets it
    number = min(usable_cores() * 2 // 3 // ranks, max(_PROCESSES))
    if number not in _PROCESSES or len(parts) <= _TOGETHER:
        return _read(_make_cache, parts, _TOGETHER)
    groups = _split(parts, -(-len(parts) // number))
    processes = _started.get(_key()) or _started.setdefault(_key(), Children(number, "object reader"))
    answers = processes.map(_read_for_parent, [(_make_cache, group) for group in groups])
    return [*chain.from_iterable(map(_contents, groups, answers))]


def _contents(group: Sequence[ObjectPart], answer: _Answer | Exception) -> list[memoryview | OSError]:
    if isinstance(answer, ChildDiedError):  # the next group starts another one
        return _read(_make_cache, group, _TOGETHER)
    if isinstance(answer, Exception):
        raise answer
    contents, counts, records = answer
    COUNTS.add(**asdict(counts))
    for record in records:
        if record.msg not in _shown:  # each process says it
            _shown.add(record.msg)
            logging.getLogger(record.name).handle(record)
    return contents


def _read(make: bytes | None, parts: Sequence[ObjectPart], together: int) -> list[memoryview | OSError]:
    """Read on many threads, each so many parts one after the other."""
    read = partial(_read_together, make)
    groups = _split(parts, together)
    return read(parts) if len(groups) <= 1 else [*chain.from_iterable(_threads(os.getpid()).map(read, groups))]


def _read_together(make: bytes | None, parts: Sequence[ObjectPart]) -> list[memoryview | OSError]:
    contents: list[memoryview | OSError] = []
    for part in parts:
        try:
            if make is None:
                contents.append(storage.fetch(part)[0])
            else:
                contents.append(_cache_of(make, os.getpid()).read(part, storage.fetch))
        except OSError as error:
            contents.append(error)
    return contents


def _split(parts: Sequence[ObjectPart], size: int) -> list[Sequence[ObjectPart]]:
    return [parts[at : at + size] for at in range(0, len(parts), size)]


# For each process, since a forked one has none of its parent's threads.
@cache
def _threads(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="readers")


_started: dict[tuple[int, str], Children] = {}
"""`_key` says for whom the processes were started."""
_shown: set[str] = set()
"""These warnings of the processes have been shown."""


def _key() -> tuple[int, str]:
    """Return the process that starts others, as a fork does not share them, and the endpoint, which they keep."""
    return os.getpid(), storage.s3_endpoint()


# Code of the processes.


_warnings: SimpleQueue[logging.LogRecord] = SimpleQueue()


def _read_for_parent(asked: tuple[bytes | None, Sequence[ObjectPart]]) -> _Answer:
    _listen()
    contents = _read(*asked, 1)
    records = [_warnings.get() for _ in range(_warnings.qsize())]
    buffers = [content if isinstance(content, OSError) else pickle.PickleBuffer(content) for content in contents]
    return buffers, COUNTS.take(), records


@cache
def _listen() -> None:
    logging.getLogger("raydali").addHandler(QueueHandler(_warnings))


def _close_cache(make: bytes) -> None:
    _cache_of(make, os.getpid()).close()
