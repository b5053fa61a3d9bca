"""Micro-batches of lost ranks: taken over exactly once, whatever loaders have begun, also after further losses."""

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from raydali.data.stream.assignment import Loss
from raydali.data.stream.stream import Stream


def stream_of(micro_batches: int, steps: int) -> Stream:
    size = 2 * micro_batches
    return Stream(samples=size * steps, epochs=1, batch_size=2, global_batch_size=size, seed=1)


@given(st.data())
def test_survivors_train_on_each_micro_batch_once(data: st.DataObject) -> None:
    """A rank trains on what it has loaded, in the order of steps; ranks are lost before a step, and may be ahead."""
    world_size = data.draw(st.integers(2, 5))
    stream = stream_of(data.draw(st.integers(world_size, 9)), data.draw(st.integers(1, 12)))
    ranks = {rank: stream.micro_batches(rank, world_size) for rank in range(world_size)}
    loaded: dict[int, set[int]] = defaultdict(set)
    ended = dict.fromkeys(ranks, False)
    losses: list[Loss] = []

    def load(rank: int, count: int) -> None:
        for _ in range(count):
            batch = next(ranks[rank], None)
            ended[rank] = batch is None
            if batch is None:
                return
            assert batch.number not in loaded[rank]
            loaded[rank].add(batch.number)

    trained: list[int] = []
    for step in range(stream.steps):
        for rank in ranks:
            load(rank, data.draw(st.integers(0, 6)))
        while len(ranks) > 1 and data.draw(st.integers(0, 3)) == 0:
            for rank in data.draw(st.sets(st.sampled_from([*ranks]), min_size=1, max_size=len(ranks) - 1)):
                del ranks[rank]
            begun = [ranks[rank].pause() for rank in ranks]
            losses = [*losses, Loss(tuple(ranks), step, max(*begun, step, *(loss.loaded for loss in losses), 0))]
            for assignment in ranks.values():
                assignment.resume(losses)
        for rank, assignment in ranks.items():
            mine = {step * stream.micro_batches_per_step + index for index in assignment.of_step(step)}
            while not mine <= loaded[rank]:
                load(rank, 1)
                assert not ended[rank]
            trained += mine
        assert sorted(trained) == [*range((step + 1) * stream.micro_batches_per_step)]
    for rank in ranks:
        assert next(ranks[rank], None) is None


def test_afterwards_survivors_take_turns_as_if_they_had_been_all() -> None:
    stream = stream_of(6, 9)
    taken, other = stream.micro_batches(2, 3), stream.micro_batches(1, 2, start=4)
    for _ in range(5):
        next(taken)  # the first of step 2
    assert taken.pause() == 3
    taken.resume([Loss((0, 2), 1, 4)])
    numbers = [batch.number for batch in taken]
    assert {number for number in numbers if number >= 24} == {batch.number for batch in other}
    assert sorted({number // 6 for number in numbers if number % 6 in (1, 4)}) != []
