"""The trace of a run that is over: its rows, and how they are held against its stream, promise 1."""

import io

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from raydali.data.stream.stream import Stream
from raydali.run.folder import RunFolder
from raydali.run.sample_trace import SCHEMA


def read_samples(folder: RunFolder) -> pa.Table:
    """Return all rows of a run in the order of the stream."""
    files = [file for file in folder.files("samples") if file.endswith(".parquet")]
    tables = [parquet.read_table(io.BytesIO(folder.read(f"samples/{file}"))) for file in files]
    table = pa.concat_tables([SCHEMA.empty_table(), *tables])
    return table.take(np.lexsort((table["micro_batch"].to_numpy(), table["step"].to_numpy())))  # lexsort is stable


def assert_whole(folder: RunFolder, stream: Stream) -> None:
    """Each sample of the stream stands in the trace once, in the stream's order, and nothing else does."""
    ids = np.concatenate([micro_batch.ids for micro_batch in stream.micro_batches(0, 1)])
    np.testing.assert_array_equal(read_samples(folder)["id"].to_numpy(), ids)
