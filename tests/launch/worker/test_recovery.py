"""Ranks that die by SIGKILL at every point of a step: the survivors train on, and to the same weights in float64."""

import random
from collections.abc import Callable
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch

from tests.support import mortal_host
from tests.support.mortal_ranks import CALLS_AT, COMPLETE_AT, EPOCHS_END_AT, STREAM, Death, Outcome, Point

KILLS = 200
MOST_SECONDS = 5.0
Run = Callable[..., tuple[dict[int, Outcome], int, float]]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def run_mortal(request: pytest.FixtureRequest) -> Run:
    """Run the ranks on the CPU with gloo, and again on a GPU with NCCL."""
    device = torch.device(request.param, *([0] if request.param == "cuda" else []))
    return partial(mortal_host.run_mortal, device=device)


@pytest.fixture(scope="module")
def undisturbed(run_mortal: Run) -> Outcome:
    return run_mortal(1)[0][0]


def check(outcomes: dict[int, Outcome], survivors: set[int], undisturbed: Outcome) -> None:
    assert {*outcomes} == survivors
    numbers = [number for outcome in outcomes.values() for number in outcome.trained]
    for outcome in outcomes.values():
        for step, sums in outcome.validated.items():
            np.testing.assert_allclose(sums, undisturbed.validated[step], rtol=1e-9, err_msg=f"after step {step}")
        assert sorted([*numbers, *outcome.of_lost_ranks]) == [*range(STREAM.steps * STREAM.micro_batches_per_step)]
        for name, weight in undisturbed.weights.items():
            np.testing.assert_allclose(outcome.weights[name], weight, rtol=1e-9, atol=1e-11, err_msg=name)


CASES = {
    "nobody": (),
    "in a warm-up step, and in the first step": (Death(1, -1, "in"), Death(0, 0, "forward")),
    "rank 0 between two warm-up steps": (Death(0, -1, "update"),),
    "rank 0 before its all-reduce": (Death(0, 2, "before"),),
    "in the all-reduce, then another at the end": (Death(1, 3, "in"), Death(2, 15, "forward")),
    "after the update": (Death(2, 0, "update"),),
    "two at once": (Death(0, 4, "after"), Death(1, 4, "forward")),
    "one while recovering": (Death(1, 5, "forward"), Death(0, 5, "group")),
}


def test_survivors_share_the_state_of_the_one_that_finished_the_step(run_mortal: Run, undisturbed: Outcome) -> None:
    """Rank 1 does not get the sum of step 6, others do; the one that could give it the state may be lost, too."""
    outcomes, _, _ = run_mortal(4, (Death(0, 6, "update"), Death(2, 7, "share")), {1: {6}})
    check(outcomes, {1, 3}, undisturbed)


@pytest.mark.parametrize("deaths", CASES.values(), ids=CASES.keys())
def test_survivors_finish_the_run(deaths: tuple[Death, ...], run_mortal: Run, undisturbed: Outcome) -> None:
    outcomes, _, _ = run_mortal(3, deaths)
    check(outcomes, {0, 1, 2} - {death.rank for death in deaths}, undisturbed)


REPLACED = {
    "one": ((Death(1, 2, "before"),), {}),
    "in a warm-up step, of which another has no sum": ((Death(2, -1, "after"),), {1: {-1}}),
    "rank 0": ((Death(0, 2, "in"),), {}),
    "two": ((Death(1, 2, "before"), Death(2, 3, "forward")), {}),
    "while others have the sum": ((Death(0, 2, "update"),), {1: {2}}),
    "another, while ranks wait for its replacement": ((Death(2, 9, "forward"), Death(1, 10, "wait")), {}),
    "in a validation": ((Death(1, 5, "call 1"),), {}),
    "rank 0 in a validation, when it has gathered the scores of all": ((Death(0, 5, "call 3"),), {}),
    "rank 0 in a validation, when others may be in the next step": ((Death(0, 5, "call 4"),), {}),
    "two in a validation, one after the other": ((Death(2, 5, "call 0"), Death(0, 5, "call 2")), {}),
    "its replacement in the validation, too": ((Death(1, 5, "call 2"), Death(1, 5, "call 1", True)), {}),
    "in a checkpoint": ((Death(1, CALLS_AT, "call 1"),), {}),
    "rank 0 in a checkpoint": ((Death(0, CALLS_AT, "call 2"),), {}),
    "its replacement, too": ((Death(1, 1, "before"), Death(1, 12, "in", True)), {}),
    "its replacement, before it has a rank": ((Death(1, 2, "before"), Death(-1, -1, "ask", True)), {}),
    "its replacement, while it joins": ((Death(1, 2, "before"), Death(1, -1, "share", True)), {}),
}


@pytest.mark.parametrize(("deaths", "late"), REPLACED.values(), ids=REPLACED.keys())
def test_a_replacement_joins_the_survivors(
    deaths: tuple[Death, ...], late: dict[int, set[int]], run_mortal: Run, undisturbed: Outcome
) -> None:
    outcomes, _, _ = run_mortal(3, deaths, late, replaces=True)
    check(outcomes, {0, 1, 2}, undisturbed)
    for death in (each for each in deaths if not each.joined):
        replaced = outcomes[death.rank]
        assert replaced.trained or any(each.joined for each in deaths), "it came too late"
        assert replaced.taken_over["of_rank"] not in ("", str(death.rank))


def test_some_are_in_a_checkpoint_when_another_has_begun_the_last_step_of_an_epoch(
    run_mortal: Run, undisturbed: Outcome
) -> None:
    """Ranks 2 and 4 are ahead. Others must not wait for the replacement of rank 4 before that step: rank 2 has not.

    In a broadcast, rank 0 sends to ranks 1, 2 and 4, and rank 1 to rank 3, which is slow.
    """
    outcomes, _, _ = run_mortal(5, (Death(4, CALLS_AT + 1, "forward"),), slow=3, replaces=True)
    check(outcomes, {*range(5)}, undisturbed)


SPARES = {
    "one": ((Death(1, 2, "before"),), 1),
    "rank 0, after the sum": ((Death(0, 3, "update"),), 1),
    "two, by two": ((Death(0, 2, "in"), Death(2, 2, "before")), 2),
    "two, one after the other": ((Death(0, 2, "in"), Death(1, 3, "forward")), 2),
    "a spare in a rank's place": ((Death(1, 2, "before"), Death(1, 11, "after", True)), 2),
    "a spare in its idle time": ((Death(-1, -1, "ask", True), Death(1, 4, "before")), 1),
    "nobody": ((), 2),
}


@pytest.mark.parametrize(("deaths", "spares"), SPARES.values(), ids=SPARES.keys())
def test_a_spare_takes_the_place_of_a_lost_rank(
    deaths: tuple[Death, ...], spares: int, run_mortal: Run, undisturbed: Outcome
) -> None:
    """Without replacements that are started after a death, so the ranks are complete only if a spare has joined."""
    outcomes, died, _ = run_mortal(3, deaths, spares=spares)
    places = {death.rank for death in deaths if not death.joined}
    complete = len(deaths) <= spares
    assert died == len(deaths)
    check(outcomes, {0, 1, 2} if complete else {*outcomes}, undisturbed)
    assert len(outcomes) == min(3, 3 + spares - died)
    for rank in places & {*outcomes}:
        assert outcomes[rank].trained or any(death.joined for death in deaths), "it came too late"
        assert outcomes[rank].taken_over["of_rank"] not in ("", str(rank))


@pytest.mark.slow
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.timeout(900)
def test_two_hundred_deaths(run_mortal: Run, undisturbed: Outcome, *, replaces: bool) -> None:
    kills, slowest, draw = 0, 0.0, random.Random(0)
    while kills < KILLS // 2:
        world_size = draw.choice([3, 4])
        ranks = draw.sample(range(world_size), draw.randint(1, world_size - 1))
        step = draw.randrange(-1, STREAM.steps - 2 * replaces)
        points: list[Point] = [draw.choice(["forward", "before", "in", "after", "update"])]
        if draw.random() < 0.4:
            step = draw.choice([CALLS_AT, *EPOCHS_END_AT[:2]] if replaces else [CALLS_AT])
            calls: list[Point] = ["call 0", "call 1", "call 2", "call 3", "call 4"]
            points = [draw.choice(calls[: 3 if step == CALLS_AT else 5])]
        points += draw.choices(get_args(Point), k=len(ranks) - 1)
        deaths = [
            Death(rank, step + (index > 0 and draw.random() < 0.5), point)
            for index, (rank, point) in enumerate(zip(ranks, points, strict=True))
        ]
        if replaces:
            deaths += [
                Death(ranks[0], COMPLETE_AT[0] + draw.randrange(3), draw.choice(["forward", "in", "update"]), True)
            ]
        late = {}
        # The update at an epoch's end ends once all have it: nobody would die there for the one who is late.
        if points[0] == "after" or (points[0] == "update" and step not in EPOCHS_END_AT):
            late = {draw.choice([rank for rank in range(world_size) if rank not in ranks]): {step}}
        outcomes, died, seconds = run_mortal(world_size, deaths, late, replaces=replaces)
        lost = {*range(world_size)} - {*outcomes}
        assert lost <= ({*()} if replaces else {*ranks})  # who would die while recovering may not have had to
        check(outcomes, {*range(world_size)} - lost, undisturbed)
        kills, slowest = kills + died, max(slowest, seconds)
    print(f"{kills} deaths, at most {slowest:.2f} s to the end of the survivors' next update")
    assert replaces or slowest <= MOST_SECONDS  # at COMPLETE_AT, ranks wait for the start of replacements
