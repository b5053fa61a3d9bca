"""TensorBoard's files of a run, in its `tensorboard/`: the numbers of each epoch at its last optimizer step.

The messages are tensorboardX's. Its writers and torch's are not used: they reach object stores through clients and
settings of their own, and write from a thread at times of their own.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from raydali.data.sources.tfrecord_format import as_record, records
from raydali.report.scalars import scalars
from raydali.run.folder import EPOCHS, RunFolder

FOLDER = "tensorboard"


class TensorBoard:
    """Writes one file for each start of a run; TensorBoard shows them as one run.

    Epochs in `epochs.jsonl` that no file has yet, because the driver died in between, are written with the next one.
    If a resume repeats an epoch, TensorBoard shows the later numbers.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        # TensorBoard reads a run's files by the order of their names.
        self._file = f"{FOLDER}/events.out.tfevents.{time.time_ns():020d}.{socket.gethostname()}.{os.getpid()}"
        self._begun = False

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a line of `epochs.jsonl`.

        Raises:
            OSError: the storage cannot be written.
        """
        from tensorboardX.proto.event_pb2 import Event  # imports torch: only when it is needed

        now = time.time()
        events, rows = [], [record]
        if not self._begun:
            files = self._folder.files(FOLDER)
            there = {event.step for file in files for event in events_of(self._folder.read(f"{FOLDER}/{file}"))}
            earlier = (row for row in self._folder.rows(EPOCHS) if row["step"] < record["step"])
            rows = [*(row for row in earlier if row["step"] not in there), record]
            events = [Event(wall_time=now, file_version="brain.Event:2")]
        for row in rows:
            values = [{"tag": tag, "simple_value": value} for tag, value in scalars(row).items()]
            events.append(Event(wall_time=now, step=row["step"], summary={"value": values}))
        self._folder.extend(self._file, b"".join(as_record(event.SerializeToString()) for event in events))
        self._begun = True


def events_of(contents: bytes) -> Iterator[Any]:
    """The Event messages in a file, up to one that was cut short."""
    from tensorboardX.proto.event_pb2 import Event

    with suppress(ValueError):
        for begin, end in records(lambda position, length: contents[position : position + length], len(contents)):
            yield Event.FromString(contents[begin:end])
