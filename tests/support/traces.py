"""The trace of a run that is over, held against its stream: promise 1."""

import numpy as np

from raydali.data.stream.stream import Stream
from raydali.run.folder import RunFolder
from raydali.run.sample_trace import read_samples


def assert_whole(folder: RunFolder, stream: Stream) -> None:
    """Each sample of the stream stands in the trace once, in the stream's order, and nothing else does."""
    ids = np.concatenate([micro_batch.ids for micro_batch in stream.micro_batches(0, 1)])
    np.testing.assert_array_equal(read_samples(folder)["id"].to_numpy(), ids)
