"""Micro-batches of lost ranks: taken over exactly once, whatever loaders have begun, also after further changes."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from raydali.data.stream.assignment import Assignment, Change
from raydali.data.stream.stream import MicroBatch, Stream


def stream_of(micro_batches: int, steps: int) -> Stream:
    size = 2 * micro_batches
    return Stream(samples=size * steps, epochs=1, batch_size=2, global_batch_size=size, seed=1)


@given(st.data())
def test_members_train_on_each_micro_batch_once(data: st.DataObject) -> None:
    """A rank trains on what it has loaded, in the order of steps; ranks change before a step, and may be ahead."""
    world_size = data.draw(st.integers(2, 5))
    stream = stream_of(data.draw(st.integers(world_size, 9)), data.draw(st.integers(1, 12)))
    ranks = {rank: stream.micro_batches(rank, world_size) for rank in range(world_size)}
    loaded: dict[int, set[int]] = defaultdict(set)
    ended = dict.fromkeys(ranks, False)
    changes: list[Change] = []

    def load(rank: int, count: int) -> None:
        for _ in range(count):
            batch = next(ranks[rank], None)
            ended[rank] = batch is None
            if batch is None:
                return
            assert batch.number not in loaded[rank]
            loaded[rank].add(batch.number)

    def change(step: int, joining: set[int]) -> None:
        begun = [ranks[rank].pause() for rank in ranks]
        loaded_by_now = max(*begun, step, *(change.loaded for change in changes), 0)
        changes.append(Change(tuple(sorted({*ranks, *joining})), step, loaded_by_now, tuple(joining)))
        for assignment in ranks.values():
            assignment.resume([*changes])
        for rank in joining:
            ranks[rank], loaded[rank] = stream.micro_batches(rank, world_size, start=loaded_by_now), set()
            ranks[rank].changes = [*changes]

    trained: list[int] = []
    by_rank: dict[int, list[int]] = defaultdict(list)
    for step in range(stream.steps):
        for rank in ranks:
            load(rank, data.draw(st.integers(0, 6)))
        while len(ranks) > 1 and data.draw(st.integers(0, 3)) == 0:
            for rank in data.draw(st.sets(st.sampled_from([*ranks]), min_size=1, max_size=len(ranks) - 1)):
                del ranks[rank]
                by_rank[rank].clear()
            change(step, data.draw(st.sets(st.sampled_from(sorted({*range(world_size)} - {*ranks})))))
        missing, joins = sorted({*range(world_size)} - {*ranks}), data.draw(st.booleans())
        if missing and joins:
            change(step, data.draw(st.sets(st.sampled_from(missing), min_size=1)))
        for rank, assignment in ranks.items():
            mine = {step * stream.micro_batches_per_step + index for index in assignment.of_step(step)}
            while not mine <= loaded[rank]:
                load(rank, 1)
                assert not ended[rank]
            trained += mine
            by_rank[rank] += mine
        assert sorted(trained) == [*range((step + 1) * stream.micro_batches_per_step)]
    left = {batch.number for _, batch in next(iter(ranks.values())).of_lost_ranks(0, stream.steps)}
    assert left == {*trained} - {number for numbers in by_rank.values() for number in numbers}
    for rank in ranks:
        assert next(ranks[rank], None) is None


def test_a_replacement_takes_the_turns_of_the_lost_rank() -> None:
    stream = stream_of(4, 9)
    changes = [Change((0, 2), 1, 3), Change((0, 1, 2), 5, 6, (1,))]
    joined: Assignment[MicroBatch] = stream.micro_batches(1, 3, start=6)
    joined.changes = changes
    assert [joined.of_step(5), joined.of_step(6)] == [[], [1]]
    assert [(batch.step, batch.index) for batch in joined] == [(6, 1), (7, 1), (8, 1)]


def test_afterwards_survivors_take_turns_as_if_they_had_been_all() -> None:
    stream = stream_of(6, 9)
    taken, other = stream.micro_batches(2, 3), stream.micro_batches(1, 2, start=4)
    for _ in range(5):
        next(taken)  # the first of step 2
    assert taken.pause() == 3
    taken.resume([Change((0, 2), 1, 4)])
    numbers = [batch.number for batch in taken]
    assert {number for number in numbers if number >= 24} == {batch.number for batch in other}
    assert sorted({number // 6 for number in numbers if number % 6 in (1, 4)}) != []
