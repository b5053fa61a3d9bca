"""The trace of samples: the stream's order back from any ranks' files, and what a resume drops."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from raydali.data.stream.stream import Stream
from raydali.run.folder import RunFolder
from raydali.run.sample_trace import SCHEMA, SampleTrace, drop_samples
from tests.support.messages import mentioning
from tests.support.traces import read_samples

STREAM = Stream(samples=50, epochs=3, batch_size=4, global_batch_size=24, seed=5)  # 6 steps, the third across a seam
BATCHES = list(STREAM.micro_batches(0, 1))


def trace(folder: RunFolder, steps: Iterable[int], world_size: int) -> None:
    """What the ranks of one worker group write at one checkpoint, the last rank first."""
    for rank in reversed(range(world_size)):
        trace = SampleTrace(folder, rank)
        for batch in BATCHES:
            if batch.step in steps and batch.index % world_size == rank:
                trace.add(batch)
        trace.flush()


def test_rows_come_back_in_the_order_of_the_stream(folder: RunFolder) -> None:
    trace(folder, range(0, 2), world_size=4)
    trace(folder, range(2, 3), world_size=1)
    trace(folder, range(3, 6), world_size=3)
    table = read_samples(folder)
    assert table.schema == SCHEMA
    for name, expected in {
        "id": [batch.ids for batch in BATCHES],
        "epoch": [batch.epochs for batch in BATCHES],
        "step": [np.full(4, batch.step) for batch in BATCHES],
        "micro_batch": [np.full(4, batch.index) for batch in BATCHES],
    }.items():
        np.testing.assert_array_equal(table[name].to_numpy(), np.concatenate(expected))
    ranks = table["rank"].to_numpy().reshape(6, 6, 4)[:, :, 0]
    assert ranks.tolist() == [[0, 1, 2, 3, 0, 1]] * 2 + [[0] * 6] + [[0, 1, 2, 0, 1, 2]] * 3
    assert table["replaced_by"].null_count == len(table) == 144


def test_repeats_come_back(folder: RunFolder) -> None:
    stream = STREAM, replace(STREAM, global_batch_size=8, repeats=3)
    for rank, each in enumerate(stream):
        trace = SampleTrace(folder, rank)
        for batch in each.micro_batches(0, 1):
            trace.add(batch)
        trace.flush()
    table = read_samples(folder)
    assert table.schema == SCHEMA and table["repeat"].null_count == 0
    before, now = (table.filter(table["rank"].to_numpy() == rank)["repeat"].to_numpy() for rank in range(2))
    assert len(before) == 144 and not before.any()
    expected = [batch.repeats for batch in stream[1].micro_batches(0, 1) if batch.repeats is not None]
    np.testing.assert_array_equal(now, np.concatenate(expected))


def test_no_trace_is_an_empty_table(folder: RunFolder) -> None:
    SampleTrace(folder, 0).flush()
    assert folder.files("samples") == []
    table = read_samples(folder)
    assert (table.schema, len(table)) == (SCHEMA, 0)


def test_a_flush_writes_only_what_came_since_the_last(folder: RunFolder) -> None:
    trace = SampleTrace(folder, 7)
    for batch in BATCHES[:6]:
        trace.add(batch)
    trace.flush()
    trace.flush()
    for batch in BATCHES[6:18]:
        trace.add(batch)
    trace.flush()
    assert folder.files("samples") == [
        "step-000000000-000000000-rank-00007.parquet",
        "step-000000001-000000002-rank-00007.parquet",
    ]
    assert len(read_samples(folder)) == 72


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (2, 2), (4, 4), (6, 6)])
def test_files_from_the_step_on_are_dropped(folder: RunFolder, step: int, kept: int) -> None:
    for first in (0, 2, 4):
        trace(folder, range(first, first + 2), world_size=2)
    drop_samples(folder, step)
    assert read_samples(folder)["step"].to_pylist() == np.repeat(range(kept), 24).tolist()


def test_dropped_steps_can_be_retrained_by_other_workers(folder: RunFolder) -> None:
    trace(folder, range(0, 3), world_size=2)
    trace(folder, range(3, 5), world_size=3)
    drop_samples(folder, 3)
    trace(folder, range(3, 6), world_size=4)
    ids = np.concatenate([batch.ids for batch in BATCHES])
    np.testing.assert_array_equal(read_samples(folder)["id"].to_numpy(), ids)


@pytest.mark.parametrize("step", [1, 2])
def test_a_file_across_the_step_is_an_error_and_stays(folder: RunFolder, step: int) -> None:
    trace(folder, range(0, 3), world_size=1)
    with pytest.raises(RuntimeError, match=mentioning(f"step-000000000-000000002-rank-00000.parquet {step}")):
        drop_samples(folder, step)
    assert len(read_samples(folder)) == 72


def test_leftovers_of_a_crash_are_passed_over_and_cleaned_up(folder: RunFolder) -> None:
    trace(folder, range(0, 3), world_size=1)
    # Of before, across and behind the step; with the same name as a whole file or with one of its own.
    for steps in ("000000000-000000002", "000000001-000000004", "000000003-000000003"):
        folder.write(f"samples/step-{steps}-rank-00000.parquet.partial-4711", b"PAR1")
    folder.write("samples/notes.txt", b"somebody else's")
    assert len(read_samples(folder)) == 72
    drop_samples(folder, 3)
    assert folder.files("samples") == ["notes.txt", "step-000000000-000000002-rank-00000.parquet"]
