"""TensorBoard's files of a run, in its `tensorboard/`: the numbers of each epoch at its last optimizer step.

The messages are tensorboardX's. Its writers and torch's are not used: they reach object stores through clients and
settings of their own, and write from a thread at times of their own.
"""

import importlib.util
import math
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

from raydali.data.index.tfrecord import as_record, records
from raydali.run.folder import EPOCHS, RunFolder
from raydali.text import printable

FOLDER = "tensorboard"
_START = 1
"""Status of the start of a session: TensorBoard drops what it has of this and later steps."""

GROUPS = {
    "train": ("loss", "learning_rate"),
    "speed": (
        "images_per_second",
        "ceiling_images_per_second",
        "of_ceiling",
        "gpu_busy",
        "mfu",
        "loader_wait_fraction",
        "loader_images_per_second",
    ),
    "time": ("seconds", "loader_wait_seconds", "step_seconds", "first_batch_seconds", "checkpoint_seconds"),
    "run": ("epoch", "images", "samples_consumed", "world_size"),
}
"""Fields of the line by group; the numbers of its `validation` are a group too."""


class TensorBoard:
    """Writes one file for each start of a run; TensorBoard shows them as one run.

    Epochs in `epochs.jsonl` that no file has yet, because the driver died in between, are written with the next one.
    If a resume repeats epochs, the start of a session makes TensorBoard drop their earlier numbers.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        # TensorBoard reads a run's files by the order of their names.
        self._file = f"{FOLDER}/events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._step = math.inf

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a line of `epochs.jsonl`.

        Raises:
            OSError: the storage cannot be written.
        """
        now, new_event = time.time(), _event_message()
        events, rows = [], [record]
        if self._step == math.inf:
            files = (self._folder.read(f"{FOLDER}/{file}") for file in self._folder.files(FOLDER))
            shown = [event.step for file in files for event in events_of(file) if event.summary.value]
            newest = shown[-1] if shown else -1  # later steps of earlier files were dropped before it
            rows = [*(row for row in self._folder.rows(EPOCHS) if newest < row["step"] < record["step"]), record]
            events = [new_event(wall_time=now, file_version="brain.Event:2")]
        if record["step"] <= self._step:  # at the first epoch of this driver, and after a restart of its workers
            events.append(new_event(wall_time=now, step=record["step"], session_log={"status": _START}))
        for row in rows:
            values = [{"tag": tag, "simple_value": value} for tag, value in scalars(row).items()]
            events.append(new_event(wall_time=now, step=row["step"], summary={"value": values}))
        self._folder.extend(self._file, b"".join(as_record(event.SerializeToString()) for event in events))
        self._step = record["step"]


def events_of(contents: bytes) -> Iterator[Any]:
    """The Event messages in a file, up to one that was cut short."""
    message = _event_message()
    with suppress(ValueError):
        for begin, end in records(lambda position, length: contents[position : position + length], len(contents)):
            yield message.FromString(contents[begin:end])


@cache
def _event_message() -> type[Any]:
    """Return the class of tensorboardX's message Event, without the package's own imports of PyTorch and boto3."""
    spec = importlib.util.find_spec("tensorboardX") if "tensorboardX" not in sys.modules else None
    if spec is not None:
        sys.modules["tensorboardX"] = importlib.util.module_from_spec(spec)  # which is not executed
    try:
        message: type[Any] = importlib.import_module("tensorboardX.proto.event_pb2").Event
    finally:
        if spec is not None:
            del sys.modules["tensorboardX"]
    return message


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line of `epochs.jsonl` by names such as "train/loss" and "validation/top1".

    Names are printable, as Protocol Buffers need it.
    """
    named = {f"{group}/{name}": record.get(name) for group, names in GROUPS.items() for name in names}
    named |= {f"validation/{name}": value for name, value in (record.get("validation") or {}).items()}
    return {
        printable(name): float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
