"""The trace of samples: Parquet files in the run's samples/, with the rank and the step of each id."""

import io
import re
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from raydali.data.stream.stream import MicroBatch
from raydali.run.folder import RunFolder

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("epoch", pa.int64()),
        ("rank", pa.int32()),
        ("micro_batch", pa.int32()),
        ("id", pa.int64()),
        ("replaced_by", pa.int64()),
        ("repeat", pa.int32()),
        ("loss", pa.float64()),
    ]
)

_FILE = r"step-(\d+)-(\d+)-rank-\d+\.parquet(\.partial-[\w-]+)?"


class SampleTrace:
    """The trace of one rank, which is written to a file before each checkpoint.

    A row has step (global batch), epoch, rank, micro_batch (index in the global batch), id, replaced_by (null unless
    the sample is broken), repeat (how often the id came before in its cycle of epochs), and loss (of the global batch).
    The rows of a micro-batch have the order of the stream.

    Attributes:
        losses: the losses of the global batches that are known.
    """

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._micro_batches: list[MicroBatch] = []
        self.losses: dict[int, float] = {}

    def add(self, micro_batch: MicroBatch) -> None:
        """Add a micro-batch that was trained on."""
        self._micro_batches.append(micro_batch)

    def flush(self) -> None:
        """Write the rows since the last flush to one file.

        Raises:
            OSError: the file cannot be written; the next flush tries again.
        """
        batches = sorted(self._micro_batches, key=lambda batch: batch.number)
        if not batches:
            return
        sizes = [len(batch.ids) for batch in batches]
        ids = np.concatenate([batch.ids for batch in batches])
        none = np.full_like(ids, -1)
        replaced = [none[: len(batch.ids)] if batch.replaced_by is None else batch.replaced_by for batch in batches]
        replaced_by = np.concatenate(replaced)
        columns: list[Any] = [
            np.repeat([batch.step for batch in batches], sizes),
            np.concatenate([batch.epochs for batch in batches]),
            np.full(len(ids), self._rank, np.int32),
            np.repeat(np.array([batch.index for batch in batches], np.int32), sizes),
            ids,
            pa.array(replaced_by, pa.int64(), mask=replaced_by == -1),
            np.concatenate([np.zeros_like(batch.ids) if batch.repeats is None else batch.repeats for batch in batches]),
            np.repeat([self.losses.get(batch.step, np.nan) for batch in batches], sizes),
        ]
        sink = io.BytesIO()
        parquet.write_table(pa.table(columns, schema=SCHEMA), sink)
        first, last = batches[0].step, batches[-1].step
        self._folder.write(f"samples/step-{first:09d}-{last:09d}-rank-{self._rank:05d}.parquet", sink.getvalue())
        self._micro_batches, self.losses = [], {}


def drop_samples(folder: RunFolder, step: int) -> None:
    """Drop the rows from global batch `step` on, which a resume will write again, and incomplete files.

    Raises:
        RuntimeError: a file has rows before and after the step.
    """
    for file in folder.files("samples"):
        match = re.fullmatch(_FILE, file)
        if match is None or (int(match[2]) < step and not match[3]):
            continue
        if int(match[1]) < step and not match[3]:
            raise RuntimeError(f"{folder}/samples/{file} has steps before and after step {step}, the checkpoint's")
        folder.remove(f"samples/{file}")


def read_trace(folder: RunFolder, steps: range) -> list[dict[str, Any]]:
    """Return the rows of these steps in a folder, in the order of the stream; "read" is the id that was read."""
    rows = list[dict[str, Any]]()
    for file in folder.files(""):
        match = re.fullmatch(_FILE, file)
        if match is not None and not match[3] and int(match[1]) < steps.stop and int(match[2]) >= steps.start:
            rows += parquet.read_table(io.BytesIO(folder.read(file))).to_pylist()
    for row in rows:
        row["read"] = row["id"] if row["replaced_by"] is None else row["replaced_by"]
        row["repeat"] = row.get("repeat") or 0  # traces of earlier versions have none
    return sorted((row for row in rows if row["step"] in steps), key=lambda row: (row["step"], row["micro_batch"]))
