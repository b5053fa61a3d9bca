"""The stream under any world sizes and cuts: every sample once, the epochs' lines, states and refusals."""

import json
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydali.data.stream.permutation import BlockPermutation, Permutation
from raydali.data.stream.stream import MicroBatch, OrderedPass, Stream
from raydali.errors import UsageError
from tests.support.clocks import least_cpu_seconds
from tests.support.messages import mentioning

Sample = tuple[int, int]  # epoch, id
BILLION = 10**9


def stream_of(
    *, samples: int = 10, epochs: int = 2, batch_size: int = 2, global_batch_size: int = 4, seed: int = 0
) -> Stream:
    return Stream(samples=samples, epochs=epochs, batch_size=batch_size, global_batch_size=global_batch_size, seed=seed)


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    batch_size, micro_batches = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    global_batch_size = batch_size * micro_batches
    return Stream(
        samples=draw(st.integers(global_batch_size, 5 * global_batch_size + 1)),
        epochs=draw(st.integers(1, 5)),
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        seed=draw(st.integers(0, 2**63 - 1)),
        shuffle_block=draw(st.sampled_from([0, 0, 1, 2, 3, 7, 50])),
        shuffle_window=draw(st.sampled_from([0, 0, 1, 2, 5])),
        shuffle_apart=draw(st.booleans()),
    )


def reference(stream: Stream) -> list[Sample]:
    """Every epoch's order, one after the other, as long as whole global batches last."""
    everything = []
    for epoch in range(stream.epochs):
        order: Permutation | BlockPermutation = Permutation(stream.samples, stream.seed, epoch)
        if stream.shuffle_block:
            order = BlockPermutation(stream.samples, stream.shuffle_block, stream.seed, epoch, stream.shuffle_window)
        ids = order(np.arange(stream.samples)).tolist()
        if stream.shuffle_block and stream.shuffle_apart:
            places = range(epoch * stream.samples, (epoch + 1) * stream.samples)
            indices = [place // stream.batch_size % stream.micro_batches_per_step for place in places]
            ids = [id for _, id in sorted(zip(np.argsort(indices, kind="stable").tolist(), ids, strict=True))]
        for sample in ids:
            everything.append((epoch, sample))
    while len(everything) % stream.global_batch_size:
        everything.pop()
    return everything


def samples_of(batch: MicroBatch) -> list[Sample]:
    return list(zip(batch.epochs.tolist(), batch.ids.tolist(), strict=True))


def consumed_by_ranks(stream: Stream, world_size: int, start: int, steps: int) -> list[Sample]:
    """What `world_size` ranks consume in `steps` global batches, put back in the order of micro-batches."""
    shares = [stream.micro_batches_of(rank, world_size) for rank in range(world_size)]
    taken = [
        list(islice(stream.micro_batches(rank, world_size, start=start), steps * shares[rank]))
        for rank in range(world_size)
    ]
    in_order = []
    for step in range(start, start + steps):
        for index in range(stream.micro_batches_per_step):
            batch = taken[index % world_size].pop(0)
            assert (batch.step, batch.index) == (step, index)
            assert batch.number == step * stream.micro_batches_per_step + index
            assert len(batch.ids) == stream.batch_size
            in_order += samples_of(batch)
    assert not any(taken)
    return in_order


@given(streams(), st.data())
def test_any_world_sizes_and_cuts_consume_the_same_stream(stream: Stream, data: st.DataObject) -> None:
    sizes = [size for size in range(1, stream.batch_size + 1) if stream.batch_size % size == 0]
    segments = [*data.draw(st.lists(st.integers(0, 8), max_size=6)), stream.steps]  # the last one runs to the end

    consumed: list[Sample] = []
    saved = json.dumps(stream.state(0))
    for steps in segments:  # each of them may divide the micro-batches
        cut = replace(stream, batch_size=data.draw(st.sampled_from(sizes)), order_batch_size=stream.batch_size)
        world_size = data.draw(st.integers(1, cut.micro_batches_per_step))
        done = cut.steps_of(json.loads(saved))
        now = min(steps, stream.steps - done)
        consumed += consumed_by_ranks(cut, world_size, done, now)
        saved = json.dumps(cut.state(done + now))

    assert json.loads(saved)["samples_consumed"] == len(consumed)
    assert consumed == reference(stream)
    # No repeat, and nothing lost but less than one global batch at the end of the last epoch.
    assert max(Counter(consumed).values()) == 1
    everything = {(epoch, sample) for epoch in range(stream.epochs) for sample in range(stream.samples)}
    lost = everything - set(consumed)
    assert len(lost) == len(everything) - len(consumed) < stream.global_batch_size
    assert {epoch for epoch, _ in lost} <= {stream.epochs - 1}


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"repeats": 3},
        {"shuffle_block": 5},
        {"shuffle_block": 5, "shuffle_window": 2, "repeats": 2},
        {"shuffle_block": 5, "shuffle_window": 2, "shuffle_apart": True},
    ],
)
def test_one_worker_becomes_two_and_four_and_one_in_mid_epoch(order: dict[str, Any]) -> None:
    stream = Stream(samples=203, epochs=3, batch_size=16, global_batch_size=16, seed=3, **order)
    due = {(batch.step, batch.index): batch for batch in stream.micro_batches(0, 1)}
    trained = dict[int, list[MicroBatch]]()
    for world_size, start, end in ((1, 0, 3), (2, 3, 8), (4, 8, 17), (1, 17, stream.steps)):
        cut = replace(stream, batch_size=16 // world_size, order_batch_size=16)
        for rank in range(world_size):
            for batch in islice(cut.micro_batches(rank, world_size, start=start), end - start):
                trained.setdefault(batch.step, []).append(batch)
    assert len(trained) == len(due) == 38
    for step, batches in trained.items():
        whole = due[step, 0]
        for name in ("ids", "epochs", "draw_keys"):
            np.testing.assert_array_equal(
                np.concatenate([getattr(each, name) for each in batches]), getattr(whole, name)
            )


def test_workers_that_a_smaller_batch_would_suffice_are_told_it() -> None:
    stream = stream_of(samples=96, batch_size=24, global_batch_size=48)
    for workers, size in ((3, 12), (4, 12), (5, 8), (48, 1)):
        with pytest.raises(UsageError, match=mentioning(f"{workers} workers 48 24 --batch-size {size}")):
            stream.micro_batches_of(0, workers)
        replace(stream, batch_size=size, order_batch_size=24).micro_batches_of(0, workers)
    with pytest.raises(UsageError, match=mentioning("49 workers 48 --global-batch-size")):
        stream.micro_batches_of(0, 49)
    divided = replace(stream, batch_size=4, order_batch_size=24)
    with pytest.raises(UsageError, match=mentioning("16 workers 12 (48 / 4) --batch-size 3")):
        divided.micro_batches_of(0, 16)
    with pytest.raises(UsageError, match=mentioning("--batch-size 24 16 12")):
        replace(stream, batch_size=16, order_batch_size=24)


@given(streams(), st.data())
def test_ranks_end_with_the_run(stream: Stream, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, stream.micro_batches_per_step))
    start = data.draw(st.integers(0, stream.steps))
    everything = sorted(
        batch.number for rank in range(world_size) for batch in stream.micro_batches(rank, world_size, start=start)
    )
    first, end = (step * stream.micro_batches_per_step for step in (start, stream.steps))
    assert everything == list(range(first, end))


@settings(max_examples=30)
@given(streams())
def test_the_seed_alone_orders_the_samples(stream: Stream) -> None:
    """Batch sizes cut the stream and leave its order alone, unless micro-batches have blocks of their own."""
    stream = replace(stream, shuffle_apart=False)
    whole = [*stream.micro_batches(0, 1)]
    cut = replace(stream, batch_size=1, global_batch_size=1)
    ids = np.concatenate([batch.ids for batch in whole])
    np.testing.assert_array_equal(ids, np.concatenate([batch.ids for batch in cut.micro_batches(0, 1)])[: len(ids)])


def test_an_epoch_begins_inside_a_global_batch() -> None:
    batches = [*stream_of(samples=10, epochs=2, batch_size=2, global_batch_size=4).micro_batches(0, 1)]
    assert [batch.epochs.tolist() for batch in batches] == [[0, 0]] * 5 + [[1, 1]] * 5
    assert [batch.step for batch in batches] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    odd = [*stream_of(samples=5, epochs=2, batch_size=2, global_batch_size=4).micro_batches(0, 1)]
    assert [batch.epochs.tolist() for batch in odd] == [[0, 0], [0, 0], [0, 1], [1, 1]]


@given(streams())
def test_lines_fall_where_an_epoch_is_reached(stream: Stream) -> None:
    """Against counting samples one global batch after the other."""
    closed_by: dict[int, list[int]] = {}
    consumed, epoch = 0, 0
    for step in range(stream.epochs * stream.samples // stream.global_batch_size):
        consumed += stream.global_batch_size
        while epoch < stream.epochs and consumed >= (epoch + 1) * stream.samples:
            closed_by.setdefault(step, []).append(epoch)
            epoch += 1
    last = consumed // stream.global_batch_size - 1
    closed_by.setdefault(last, []).extend(range(epoch, stream.epochs))
    closed_by = {step: epochs for step, epochs in closed_by.items() if epochs}

    assert stream.steps == last + 1
    assert [stream.epoch_closed_by(step) for step in range(stream.steps)] == [
        closed_by[step][-1] if step in closed_by else None for step in range(stream.steps)
    ]
    for step, epochs in closed_by.items():
        for each in epochs:
            assert stream.end_step(each) == step + 1
    for step in range(stream.steps):
        next_line = min(line for line in closed_by if line >= step)
        assert stream.epoch_of(step) == closed_by[next_line][-1]


def test_lines_of_the_sizes_in_the_drawing() -> None:
    stream = stream_of(samples=10, epochs=2, batch_size=2, global_batch_size=4)
    assert [stream.end_step(epoch) for epoch in range(2)] == [3, 5]
    assert [stream.epoch_closed_by(step) for step in range(5)] == [None, None, 0, None, 1]
    assert [stream.epoch_of(step) for step in range(5)] == [0, 0, 0, 1, 1]


def test_of_two_epochs_that_end_together_the_later_is_recorded() -> None:
    stream = stream_of(samples=5, epochs=2, batch_size=2, global_batch_size=4)  # 10 samples are 2 global batches
    assert [stream.end_step(epoch) for epoch in range(2)] == [2, 2]
    assert [stream.epoch_closed_by(step) for step in range(2)] == [None, 1]
    assert [stream.epoch_of(step) for step in range(2)] == [1, 1]  # epoch 0 has no line


def test_a_billion_samples_are_resumed_at_once() -> None:
    stream = stream_of(samples=BILLION, epochs=90, batch_size=256, global_batch_size=8192, seed=7)
    step = stream.steps_of({"seed": 7, "samples_consumed": 10**7 * 8192})
    begun = least_cpu_seconds(lambda: next(stream.micro_batches(3, 8)), 20)
    resumed = least_cpu_seconds(lambda: next(stream.micro_batches(3, 8, start=step)), 20)
    assert resumed < 20 * begun, "what lies before is not gone through"
    batch = next(stream.micro_batches(3, 8, start=step))
    assert (batch.step, batch.index, batch.number) == (10**7, 3, 10**7 * 32 + 3)
    epoch, offset = divmod(10**7 * 8192 + 3 * 256, BILLION)
    assert batch.epochs.tolist() == [epoch] * 256
    assert batch.ids.tolist() == Permutation(BILLION, 7, epoch)(np.arange(offset, offset + 256)).tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_batch_size": 5}, "5 2 6"),
        ({"samples": 3}, "3 samples 4"),
        ({"samples": 0}, "samples 1 0"),
        ({"epochs": 0}, "epochs 1 0"),
        ({"batch_size": 0}, "batch_size 1 0"),
        ({"global_batch_size": -4}, "global_batch_size 1 -4"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 1 << 63}, f"seed {1 << 63}"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        stream_of(**settings)


@given(streams(), st.data())
def test_more_workers_than_micro_batches_are_refused(stream: Stream, data: st.DataObject) -> None:
    most = stream.micro_batches_per_step
    for world_size in range(1, most + 1):
        shares = [stream.micro_batches_of(rank, world_size) for rank in range(world_size)]
        assert sum(shares) == most
        assert min(shares) >= 1
    workers = data.draw(st.integers(most + 1, most + 50))
    named = mentioning(f"{workers} workers {most} ({stream.global_batch_size} / {stream.batch_size}) --workers")
    with pytest.raises(UsageError, match=named):
        stream.micro_batches_of(0, workers)
    with pytest.raises(UsageError, match=named):
        next(stream.micro_batches(0, workers))


@given(streams(), st.data())
def test_states_come_back(stream: Stream, data: st.DataObject) -> None:
    steps = data.draw(st.integers(0, stream.steps))
    assert stream.state(steps) == {"seed": stream.seed, "samples_consumed": steps * stream.global_batch_size}
    assert stream.steps_of(stream.state(steps)) == steps


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"seed": 1, "samples_consumed": 4}, "seed 1 0"),
        ({"seed": 0, "samples_consumed": 6}, "6 samples 4 2 epochs"),
        ({"seed": 0, "samples_consumed": 24}, "24 samples 4 2 epochs"),
    ],
)
def test_states_of_other_settings_are_refused(state: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        stream_of().steps_of(state)


@given(st.integers(1, 60), st.integers(1, 10), st.integers(1, 10))
def test_an_ordered_pass_has_each_sample_once(samples: int, batch_size: int, world_size: int) -> None:
    ordered = OrderedPass(samples=samples, batch_size=batch_size)
    taken = [[*ordered.micro_batches(rank, world_size)] for rank in range(world_size)]
    in_order = sorted((batch for batches in taken for batch in batches), key=lambda batch: batch.number)
    assert [sample for batch in in_order for sample in batch.ids.tolist()] == list(range(samples))
    assert [batch.ids.tolist() for batch in in_order] == [batch.ids.tolist() for batch in ordered.micro_batches(0, 1)]
    assert all(len(batch.ids) == batch_size for batch in in_order[:-1])
    counts = [len(batches) for batches in taken]
    assert max(counts) - min(counts) <= 1
