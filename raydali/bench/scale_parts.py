"""The parts of a run that grow with the number of ranks, each for itself: seconds, or bytes."""

import gc
import json
import pickle
import resource
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from raydali.bench.measurement import MeasurementFailed
from raydali.data.image_folder import ImageFolder
from raydali.data.stream import Stream
from raydali.measure.records import RankRecord, epoch_record
from raydali.report.run_folder import RunFolder
from raydali.report.samples import SampleTrace

REPEATS = 5
PATIENCE = timedelta(seconds=300)
_PATH = "train/n01440764/n01440764_10026.JPEG"
"""As long as ImageNet's."""


def _seconds(do: Callable[[], object]) -> float:
    """The shortest of some times."""

    def once() -> float:
        began = time.perf_counter()
        do()
        return time.perf_counter() - began

    gc.collect()
    return min(once() for _ in range(REPEATS))


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def _records(ranks: int) -> list[RankRecord]:
    random = np.random.default_rng(0)
    return [
        RankRecord(
            rank=rank,
            world_size=ranks,
            node=f"{rank // 8:08x}",
            images=1_281_167 // ranks,
            **dict(zip(_TIMES, random.uniform(1, 1000, len(_TIMES)).tolist(), strict=True)),
        )
        for rank in range(ranks)
    ]


_TIMES = (
    "loss_sum",
    "seconds",
    "loader_wait_seconds",
    "step_seconds",
    "checkpoint_seconds",
    "first_batch_seconds",
)


def _line(ranks: int) -> dict[str, Any]:
    return epoch_record(
        [_records(ranks)],
        epoch=0,
        step=1,
        samples_consumed=1,
        learning_rate=0.123456789,
        validation={"images": 50_000, "loss": 1.23456789, "top1": 0.76543, "top5": 0.92345, "seconds": 3.45678},
        quarantined=0,
        ceiling_images_per_second=26_796.123,
    )


def gather_seconds(ranks: int) -> float:
    """Rank 0 turns what the ranks sent into records: `Worker.gather`'s work behind the network's."""
    sent = [pickle.dumps(record) for record in _records(ranks)]
    return _seconds(lambda: [pickle.loads(each) for each in sent])


def line_seconds(ranks: int) -> float:
    """Merging the records and appending the line."""
    with tempfile.TemporaryDirectory(prefix="raydali-bench-") as storage:
        folder = RunFolder(storage, "scale")
        folder.create()
        return _seconds(lambda: folder.append("epochs.jsonl", _line(ranks)))


@cache
def line_bytes(ranks: int) -> int:
    """Of an epoch's line."""
    return len(json.dumps(_line(ranks))) + 1


def read_seconds(ranks: int, epochs: int) -> float:
    """Reading a run's lines, as a resume and a report do."""
    with tempfile.TemporaryDirectory(prefix="raydali-bench-") as storage:
        folder = RunFolder(storage, "scale")
        folder.create()
        Path(folder.path("epochs.jsonl")).write_text((json.dumps(_line(ranks)) + "\n") * epochs)
        return _seconds(lambda: folder.rows("epochs.jsonl"))


@cache
def line_memory(ranks: int) -> int:
    """Of an epoch's line as Python's objects."""
    text = json.dumps(_line(ranks))
    tracemalloc.start()
    try:
        kept = json.loads(text)
        size, _ = tracemalloc.get_traced_memory()
        assert kept
        return size
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------------------------------------------------------------
# The stream, its trace, the index


def _stream(ranks: int, samples: int, batch_size: int) -> Stream:
    return Stream(samples=samples, epochs=2, batch_size=batch_size, global_batch_size=batch_size * ranks, seed=0)


def next_seconds(ranks: int, samples: int, batch_size: int) -> float:
    """The ids of a rank's next micro-batch."""
    stream, step = _stream(ranks, samples, batch_size), iter(range(1 << 30))
    return _seconds(lambda: stream.micro_batch(next(step) % stream.steps, ranks - 1))


@cache
def _trace(ranks: int, samples: int, batch_size: int) -> tuple[float, int]:
    stream = _stream(ranks, samples, batch_size)
    with tempfile.TemporaryDirectory(prefix="raydali-bench-") as storage:
        folder = RunFolder(storage, "scale")
        folder.create()
        trace = SampleTrace(folder, ranks - 1)
        for step in range(max(1, samples // stream.global_batch_size)):
            trace.add(stream.micro_batch(step, ranks - 1))
        began = time.perf_counter()
        trace.flush()
        seconds = time.perf_counter() - began
        (file,) = Path(folder.path("samples")).iterdir()
        return seconds, file.stat().st_size


def trace_seconds(ranks: int, samples: int, batch_size: int) -> float:
    """One rank writes what it trained on in an epoch, as one file."""
    return _trace(ranks, samples, batch_size)[0]


def trace_bytes(ranks: int, samples: int, batch_size: int) -> float:
    """The files of all ranks."""
    return float(ranks * _trace(ranks, samples, batch_size)[1])


@cache
def _pickled_index(samples: int) -> tuple[bytes, list[pickle.PickleBuffer]]:
    paths = [_PATH] * samples
    index = ImageFolder.from_list(
        "/data", paths, labels=np.arange(samples) % 1000, classes=[str(i) for i in range(1000)]
    )
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(index, protocol=5, buffer_callback=buffers.append), buffers


def index_bytes(samples: int) -> float:
    """What Ray's object store of a node keeps for all its workers."""
    head, buffers = _pickled_index(samples)
    return float(len(head) + sum(buffer.raw().nbytes for buffer in buffers))


def index_seconds(samples: int) -> float:
    """A worker takes the index out of its node's object store: arrays stay where they are."""
    head, buffers = _pickled_index(samples)
    return _seconds(lambda: pickle.loads(head, buffers=buffers))


# ---------------------------------------------------------------------------------------------------------------------
# Ranks that meet


def store_seconds(ranks: int) -> float:
    """All ranks leave an address at torch's store and read those of all others."""
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
    """Seconds until all ranks are connected, and of a barrier then."""

    connect: float
    barrier: float


@cache
def mesh(ranks: int) -> Mesh:
    """A gloo process group, as Ray Train makes one: every rank is connected with every other."""
    import torch.distributed as dist

    with _enough_files(ranks * ranks + 2 * ranks):
        groups: dict[int, Any] = {}

        def connect(rank: int, client: Any) -> None:
            groups[rank] = dist.ProcessGroupGloo(client, rank, ranks, PATIENCE)
            groups[rank].barrier().wait()

        def wait(rank: int, client: Any) -> None:
            groups[rank].barrier().wait()

        with _clients(ranks) as clients:
            connected = _together(connect, clients)
            return Mesh(connected, min(_together(wait, clients) for _ in range(REPEATS)))


@contextmanager
def _clients(ranks: int) -> Iterator[list[Any]]:
    """Connections to a store, one for each rank.

    They are not timed: each asks DNS for its own name, which takes seconds where DNS does not answer.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    clients: list[Any] = [None] * ranks

    def connect(rank: int, store: Any) -> None:
        clients[rank] = store.clone()

    _together(connect, [server] * ranks)
    yield clients


def _together(do: Callable[[int, Any], object], clients: Sequence[Any]) -> float:
    """Seconds until all ranks, a thread each, have done it.

    Raises:
        MeasurementFailed: one of them could not.
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
        raise MeasurementFailed(f"{len(errors)} of {len(clients)} ranks failed: {errors[0]}")
    return time.perf_counter() - began


class _enough_files:
    """Room for so many more open files, while it lasts.

    Raises:
        MeasurementFailed: the machine does not allow as many.
    """

    def __init__(self, files: int) -> None:
        self.files = files + 1000

    def __enter__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_NOFILE)
        soft, hard = self.before
        if self.files > soft:
            if self.files > hard:
                raise MeasurementFailed(f"{self.files} files must be open at once, and `ulimit -Hn` allows {hard}")
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.files, hard))

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self.before)
