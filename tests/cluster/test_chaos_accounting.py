"""What faults cost, from made events, checkpoints and samples: nothing that is lost or repeated goes unseen."""

from typing import Any

import numpy as np
import pytest

from raydali.data.stream.stream import Stream
from tests.support.chaos.__main__ import NAMES, failures
from tests.support.chaos.accounting import (
    FaultOutcome,
    Losses,
    Samples,
    first,
    lost_and_repeated,
    reached,
    shares,
)
from tests.support.chaos.faults import FAULTS

STREAM = Stream(samples=10, epochs=3, batch_size=2, global_batch_size=4, seed=0)
BATCHES = list(STREAM.micro_batches(0, 1))
REFERENCE = Samples(np.repeat([batch.step for batch in BATCHES], 2), np.concatenate([batch.ids for batch in BATCHES]))


def suffered(**given: Any) -> FaultOutcome:
    facts: dict[str, Any] = {
        "fault": "worker",
        "at": 0.0,
        "step": 0,
        "reached": 0,
        "noticed": 0.0,
        "noticed_by": "failure",
    }
    return FaultOutcome(**(facts | {"resumed": 0.0, "resumed_at": 0} | given))


def result(**given: Any) -> dict[str, Any]:
    losses = {"undisturbed": [1.0], "disturbed": [1.0], "largest_difference": 0.0, "agree": True}
    left: dict[str, list[Any]] = {"processes": [], "ports": [], "shared_memory": []}
    rows = [{"lost": 0, "repeated": 0}]
    ledger = {"missing": 0.001}
    found = {"over": None, "rows": rows, "same_stream": True, "losses": losses, "left": left, "ledger": ledger}
    return found | given


def test_the_whole_stream_loses_and_repeats_nothing() -> None:
    assert lost_and_repeated(REFERENCE, REFERENCE, 0, STREAM.steps) == (0, 0)


def test_missing_steps_are_lost_and_duplicate_steps_repeated() -> None:
    without = REFERENCE.steps != 2
    missing = Samples(REFERENCE.steps[without], REFERENCE.ids[without])
    assert lost_and_repeated(REFERENCE, missing, 0, STREAM.steps) == (4, 0)
    assert lost_and_repeated(REFERENCE, missing, 3, STREAM.steps) == (0, 0)  # another fault's
    twice = Samples(np.append(REFERENCE.steps, [5, 5]), np.append(REFERENCE.ids, REFERENCE.ids[20:22]))
    assert lost_and_repeated(REFERENCE, twice, 0, STREAM.steps) == (0, 2)


def test_a_sample_at_a_wrong_step_is_lost_and_repeated() -> None:
    ids = REFERENCE.ids.copy()
    ids[[0, 4]] = ids[[4, 0]]  # of steps 0 and 1, one epoch: ids differ
    swapped = Samples(REFERENCE.steps, ids)
    assert lost_and_repeated(REFERENCE, swapped, 0, STREAM.steps) == (2, 2)


def test_each_step_has_one_fault_that_answers_for_it() -> None:
    faults = [suffered(step=3), suffered(step=5), suffered(step=6)]
    assert shares(faults, 7) == [(0, 5), (5, 6), (6, 7)]
    assert shares(faults[:1], 7) == [(0, 7)]


def test_how_far_training_was_follows_its_pace() -> None:
    assert reached([], 5.0) == 0
    assert reached([(20, 4.0)], 5.0) == 20
    assert reached([(40, 6.0), (20, 4.0)], 6.5) == 45
    assert reached([(40, 6.0), (20, 4.0)], 60.0) == 60  # there would be another checkpoint


def test_steps_redone_are_those_after_the_resume_point() -> None:
    assert suffered(reached=45, resumed_at=40).repeated_steps == 5
    assert suffered(reached=45, resumed_at=60).repeated_steps == 0
    assert suffered(reached=45, resumed_at=None).repeated_steps == 0


def test_the_first_event_since() -> None:
    events = [{"event": name, "time": time} for name, time in (("failure", 1.0), ("resume", 2.0), ("failure", 3.0))]
    assert first(events, ["failure"], 1.5) == events[2]
    assert first(events, ["hang", "resume"], 0.0) == events[1]
    assert first(events, ["resume"], 2.5) is None


def test_losses_agree_within_the_tolerance() -> None:
    same = Losses([2.0, 0.1], [2.0, 0.1])
    assert same.agree and same.largest == 0
    assert Losses([2.0, 0.01], [2.0 + 1.9e-6, 0.01 + 0.9e-8]).agree
    apart = Losses([2.0, 1.0], [2.0, 1.1])
    assert not apart.agree and apart.largest == pytest.approx(0.1)
    assert not Losses([2.0, 0.01], [2.0, 0.01 + 1.1e-8]).agree
    assert not Losses([2.0, 1.0], [2.0]).agree
    assert not Losses([2.0], [float("nan")]).agree
    assert not Losses([0.0], [1.0]).agree and Losses([0.0], [0.0]).agree


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, None),
        ({"over": "raise --epochs"}, "raise --epochs"),
        ({"rows": [{"lost": 2, "repeated": 0}, {"lost": 1, "repeated": 0}]}, "3 samples were lost"),
        ({"rows": [{"lost": 0, "repeated": 4}]}, "4 samples were repeated"),
        ({"ledger": {"missing": 0.02}}, "the parts of the ledger miss 2.0% of the time that workers were held"),
        ({"same_stream": False}, "the samples came in another order than the stream's"),
        ({"losses": {"largest_difference": 0.2, "agree": False}}, "losses differ by up to a share of 0.2"),
        ({"left": {"processes": [], "ports": [6379, 80]}}, "left behind, ports: 6379, 80"),
        ({"left": {"shared_memory": ["torch_1"]}}, "left behind, shared memory: torch_1"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str | None) -> None:
    assert failures(result(**given)) == ([message] if message else [])


def test_every_fault_that_can_be_asked_for_is_one() -> None:
    assert set(NAMES) == set(FAULTS)
