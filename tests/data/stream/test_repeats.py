"""Repeated augmentation in the stream: each id K times a cycle, never twice in a global batch, on any ranks."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raydali.data.stream.counter_rng import uniforms
from raydali.data.stream.permutation import Permutation
from raydali.data.stream.stream import MicroBatch, Stream
from raydali.errors import UsageError
from tests.support.messages import mentioning

Sample = tuple[int, int, int]  # epoch, id, repeat
FEW = settings(max_examples=30)  # of thousands of samples each


def stream_of(**given: Any) -> Stream:
    sizes = {"samples": 24, "epochs": 4, "batch_size": 2, "global_batch_size": 4}
    return Stream(**({"seed": 3, "repeats": 2} | sizes | given))


@st.composite
def streams(draw: st.DrawFn) -> Stream:
    batch_size, micro_batches, repeats = (draw(st.integers(low, 3)) for low in (1, 1, 2))
    global_batch_size = batch_size * micro_batches
    least = 2 * repeats * global_batch_size
    return Stream(
        samples=draw(st.integers(least, least + 20)),
        epochs=draw(st.integers(1, 2 * repeats + 1)),
        batch_size=batch_size,
        global_batch_size=global_batch_size,
        seed=draw(st.integers(0, 2**63 - 1)),
        shuffle_block=draw(st.sampled_from([0, 0, 3, 50])),
        repeats=repeats,
    )


def repeats_of(batch: MicroBatch) -> NDArray[np.int64]:
    assert batch.repeats is not None
    return batch.repeats


def samples_of(batches: list[MicroBatch]) -> list[Sample]:
    return [
        sample
        for one in batches
        for sample in zip(one.epochs.tolist(), one.ids.tolist(), repeats_of(one).tolist(), strict=True)
    ]


@FEW
@given(streams())
def test_a_cycle_has_each_id_with_each_repeat_once(stream: Stream) -> None:
    batches = [*stream.micro_batches(0, 1)]
    samples = samples_of(batches)
    assert len(samples) == stream.epochs * stream.samples // stream.global_batch_size * stream.global_batch_size
    assert [epoch for epoch, _, _ in samples] == [place // stream.samples for place in range(len(samples))]

    of_cycles = Counter((epoch // stream.repeats, id, repeat) for epoch, id, repeat in samples)
    assert max(of_cycles.values()) == 1
    everything = {(id, repeat) for id in range(stream.samples) for repeat in range(stream.repeats)}
    for cycle in range(len(samples) // (stream.repeats * stream.samples)):
        assert {key[1:] for key in of_cycles if key[0] == cycle} == everything


@FEW
@given(streams())
def test_no_global_batch_has_an_id_twice(stream: Stream) -> None:
    """Within a cycle; where one cycle ends inside a global batch, the next one begins with any ids."""
    batches: dict[tuple[int, int], list[int]] = {}
    for one in stream.micro_batches(0, 1):
        for epoch, id, _ in samples_of([one]):
            batches.setdefault((one.step, epoch // stream.repeats), []).append(id)
    assert all(len({*ids}) == len(ids) for ids in batches.values())


@FEW
@given(streams())
def test_a_run_that_ends_inside_a_cycle_repeats_the_ids_of_its_first_windows(stream: Stream) -> None:
    """All others of that cycle never come; at the window's end fewer than K samples are of the next window."""
    rest = stream.epochs % stream.repeats
    last = stream.epochs // stream.repeats
    seen = Counter(id for epoch, id, _ in samples_of([*stream.micro_batches(0, 1)]) if epoch // stream.repeats == last)
    window = rest * stream.samples // stream.repeats
    in_windows = {*stream.order(last)(np.arange(window)).tolist()}
    assert sum(count for id, count in seen.items() if id not in in_windows) < stream.repeats
    lost = window * stream.repeats - sum(count for id, count in seen.items() if id in in_windows)
    assert 0 <= lost < stream.global_batch_size


@FEW
@given(streams(), st.data())
def test_any_world_sizes_and_cuts_consume_the_same_stream(stream: Stream, data: st.DataObject) -> None:
    whole = samples_of([*stream.micro_batches(0, 1)])
    cut = data.draw(st.integers(0, stream.steps))
    taken: list[MicroBatch] = []
    state = json.dumps(stream.state(0))
    for end in (cut, stream.steps):
        world_size, begin = data.draw(st.integers(1, stream.micro_batches_per_step)), stream.steps_of(json.loads(state))
        for rank in range(world_size):
            taken += [one for one in stream.micro_batches(rank, world_size, start=begin) if one.step < end]
        state = json.dumps(stream.state(end))
    assert samples_of(sorted(taken, key=lambda one: one.number)) == whole


@FEW
@given(streams())
def test_batch_sizes_leave_the_order_alone(stream: Stream) -> None:
    whole = samples_of([*stream.micro_batches(0, 1)])
    most = stream.samples // (2 * stream.repeats)
    cut = samples_of([*replace(stream, batch_size=most, global_batch_size=most).micro_batches(0, 1)])
    assert whole[: len(cut)] == cut[: len(whole)] and cut


def test_the_first_pass_over_a_window_is_the_order_of_its_cycle_and_others_have_their_own() -> None:
    ids = np.concatenate([one.ids for one in stream_of().micro_batches(0, 1)]).reshape(2, 2, 2, 12)
    for cycle in range(2):
        order = Permutation(24, 3, cycle)(np.arange(24)).reshape(2, 12)
        assert (ids[cycle, :, 0] == order).all()
        for window in range(2):
            first, second = ids[cycle, window]
            assert first.tolist() != second.tolist()
            assert {*first[:6]} == {*second[:6]} and {*first[6:]} == {*second[6:]}
    shuffles = [np.argsort(ids[c, w, 0])[np.argsort(np.argsort(ids[c, w, 1]))] for c in range(2) for w in range(2)]
    assert len({tuple(each.tolist()) for each in shuffles}) == 4


def test_in_blocks_all_passes_have_the_same_order() -> None:
    stream = stream_of(shuffle_block=3)
    ids = np.concatenate([one.ids for one in stream.micro_batches(0, 1)]).reshape(2, 2, 2, 12)
    assert (ids[:, :, 0] == ids[:, :, 1]).all()
    assert ids[0, :, 0].ravel().tolist() == stream.order(0)(np.arange(24)).tolist()


def test_known_values() -> None:
    """Of windows of 4, 4 and 5 ids; with other values, a run could not be resumed."""
    batches = [*stream_of(samples=13, epochs=3, batch_size=1, global_batch_size=2, repeats=3).micro_batches(0, 1)]
    first, second, third = (
        [10, 0, 12, 3, 10, 0, 12, 3, 0, 10, 3, 12],
        [7, 8, 4, 5, 8, 7, 4, 5, 8, 7, 4, 5],
        [11, 1, 9, 6, 2, 11, 1, 6, 9, 2, 11, 1, 6, 9],
    )
    assert [sample[1] for sample in samples_of(batches)] == first + second + third


def test_repeats_draw_other_numbers_and_the_first_those_of_its_epoch() -> None:
    drawn: dict[int, set[float]] = {}
    for one in stream_of(epochs=2).micro_batches(0, 1):
        numbers = uniforms(1, 3, one.draw_keys, one.ids)[:, 0]
        first = repeats_of(one) == 0
        assert (numbers[first] == uniforms(1, 3, one.epochs, one.ids)[:, 0][first]).all()
        for id, number in zip(one.ids.tolist(), numbers.tolist(), strict=True):
            drawn.setdefault(id, set()).add(number)
    assert [len(drawn[id]) for id in range(24)] == [2] * 24


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"repeats": 0}, "repeats 1 0"),
        ({"repeats": 4}, "--repeats 4 4 24 samples 3"),
        ({"repeats": 2, "samples": 7}, "--repeats 2 4 7 samples 1"),
        ({"shuffle_block": 4, "shuffle_apart": True}, "--repeats 2 --shuffle-apart"),
    ],
)
def test_what_does_not_compose_is_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        stream_of(**settings)


def test_a_billion_samples_cost_no_more() -> None:
    """The ids of a step far into a run, without those before."""
    stream = stream_of(samples=10**9, epochs=90, batch_size=256, global_batch_size=8192, repeats=3)
    batch = stream.micro_batch(10**7, 3)
    assert len({*batch.ids.tolist()}) == 256 and batch.epochs.tolist() == [81] * 256
    assert {*repeats_of(batch).tolist()} == {2}
