"""Costs of one process of a run that grow with its ranks: reports, the trace, the index; in seconds or bytes."""

import gc
import json
import pickle
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from raydali.data.sources.image_folder import ImageFolder
from raydali.data.stream.stream import Stream
from raydali.measure.records import RankRecord, epoch_record
from raydali.run.folder import EPOCHS, RunFolder
from raydali.run.sample_trace import SampleTrace

REPEATS = 5
_PATH = "train/n01440764/n01440764_10026.JPEG"
"""A path with the length of ImageNet's paths."""
_TIMES = ["loss_sum", "seconds", "loader_wait_seconds", "step_seconds", "checkpoint_seconds", "first_batch_seconds"]


def _seconds(do: Callable[[], object]) -> float:
    """Return the shortest of REPEATS times."""

    def once() -> float:
        began = time.perf_counter()
        do()
        return time.perf_counter() - began

    gc.collect()
    return min(once() for _ in range(REPEATS))


@contextmanager
def _run_folder() -> Iterator[RunFolder]:
    with tempfile.TemporaryDirectory(prefix="raydali-bench-") as storage:
        folder = RunFolder(storage, "scale")
        folder.create()
        yield folder


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def _records(ranks: int) -> list[RankRecord]:
    random = np.random.default_rng(0)
    images = 1_281_167 // ranks
    times = [dict(zip(_TIMES, random.uniform(1, 1000, len(_TIMES)).tolist(), strict=True)) for _ in range(ranks)]
    return [
        RankRecord(rank=rank, world_size=ranks, node=f"{rank // 8:08x}", images=images, **times[rank])
        for rank in range(ranks)
    ]


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
    """Measure how long rank 0 decodes the records of all ranks, as `Worker.gather` does after the communication."""
    sent = [pickle.dumps(record) for record in _records(ranks)]
    return _seconds(lambda: [pickle.loads(each) for each in sent])


def line_seconds(ranks: int) -> float:
    """Measure merging the records and appending the epoch's line."""
    with _run_folder() as folder:
        return _seconds(lambda: folder.append(EPOCHS, _line(ranks)))


@cache
def line_bytes(ranks: int) -> int:
    """Return the size of an epoch's line."""
    return len(json.dumps(_line(ranks))) + 1


def read_seconds(ranks: int, epochs: int) -> float:
    """Measure reading a run's lines, as a resume and a report do."""
    with _run_folder() as folder:
        Path(folder.path(EPOCHS)).write_text((json.dumps(_line(ranks)) + "\n") * epochs)
        return _seconds(lambda: folder.rows(EPOCHS))


@cache
def line_memory(ranks: int) -> int:
    """Return the memory of an epoch's line as Python objects."""
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
    """Measure computing the ids of a rank's next micro-batch."""
    stream, step = _stream(ranks, samples, batch_size), iter(range(1 << 30))
    return _seconds(lambda: stream.micro_batch(next(step) % stream.steps, ranks - 1))


@cache
def _trace(ranks: int, samples: int, batch_size: int) -> tuple[float, int]:
    stream = _stream(ranks, samples, batch_size)
    with _run_folder() as folder:
        trace = SampleTrace(folder, ranks - 1)
        for step in range(max(1, samples // stream.global_batch_size)):
            trace.add(stream.micro_batch(step, ranks - 1))
        began = time.perf_counter()
        trace.flush()
        seconds = time.perf_counter() - began
        (file,) = Path(folder.path("samples")).iterdir()
        return seconds, file.stat().st_size


def trace_seconds(ranks: int, samples: int, batch_size: int) -> float:
    """Measure one rank writing an epoch of its trace, as one file."""
    return _trace(ranks, samples, batch_size)[0]


def trace_bytes(ranks: int, samples: int, batch_size: int) -> float:
    """Return the size of all ranks' files of an epoch."""
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
    """Return the size of the index in a node's object store, which all its workers share."""
    head, buffers = _pickled_index(samples)
    return float(len(head) + sum(buffer.raw().nbytes for buffer in buffers))


def index_seconds(samples: int) -> float:
    """Measure a worker taking the index out of its node's object store; arrays are not copied."""
    head, buffers = _pickled_index(samples)
    return _seconds(lambda: pickle.loads(head, buffers=buffers))
