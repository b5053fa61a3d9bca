"""Duration of rendezvous and barriers of many ranks; each rank is a thread of this process."""

import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from raydali.bench.common.processes import MeasurementError

BARRIERS = 5
"""Number of barriers; the shortest counts."""
TIMEOUT = timedelta(seconds=300)


def store_seconds(ranks: int) -> float:
    """Measure all ranks writing an address to torch's store and reading those of all others."""
    with _enough_files(2 * ranks):
        names = [f"rank-{rank}" for rank in range(ranks)]

        def meet(rank: int, client: Any) -> None:
            client.set(names[rank], "10.0.0.1:12345")
            client.wait(names)
            client.multi_get(names)

        with _clients(ranks) as clients:
            return _together(meet, clients)


@dataclass(frozen=True)
class Mesh:
    """Seconds to connect all ranks, and of a barrier afterwards."""

    connect: float
    barrier: float


@cache
def mesh(ranks: int) -> Mesh:
    """Measure a gloo process group, as Ray Train makes one: every rank is connected with every other."""
    import torch.distributed as dist

    with _enough_files(ranks * ranks + 2 * ranks):
        groups: dict[int, Any] = {}

        def connect(rank: int, client: Any) -> None:
            groups[rank] = dist.ProcessGroupGloo(client, rank, ranks, TIMEOUT)
            groups[rank].barrier().wait()

        def wait(rank: int, _: Any) -> None:
            groups[rank].barrier().wait()

        with _clients(ranks) as clients:
            connected = _together(connect, clients)
            return Mesh(connected, min(_together(wait, clients) for _ in range(BARRIERS)))


@contextmanager
def _clients(ranks: int) -> Iterator[list[Any]]:
    """Connect each rank to a store.

    This is not timed: each connection looks up its own name, which takes seconds if DNS does not answer.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    clients: list[Any] = [None] * ranks

    def connect(rank: int, store: Any) -> None:
        clients[rank] = store.clone()

    _together(connect, [server] * ranks)
    yield clients


def _together(do: Callable[[int, Any], object], clients: Sequence[Any]) -> float:
    """Run a function on all ranks, a thread each; return the seconds until all have finished.

    Raises:
        MeasurementError: a rank failed.
    """
    errors: list[Exception] = []
    start = threading.Barrier(len(clients) + 1)

    def run(rank: int) -> None:
        start.wait()
        try:
            do(rank, clients[rank])
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(clients))]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if errors:
        raise MeasurementError(f"{len(errors)} of {len(clients)} ranks failed: {errors[0]}")
    return time.perf_counter() - began


@contextmanager
def _enough_files(more: int) -> Iterator[None]:
    """Raise the limit of open files by that many inside the block.

    Raises:
        MeasurementError: the machine does not allow as many.
    """
    files = more + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files > hard:
        raise MeasurementError(f"{files} files must be open at once, and `ulimit -Hn` allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(files, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
