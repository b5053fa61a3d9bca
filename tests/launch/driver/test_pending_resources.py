"""What a job says while its workers have no place yet, and how often."""

from typing import Any

import pytest

from raydali.launch.driver.autoscaler import AutoscalerCapacity, Group
from raydali.launch.driver.pending_resources import ClusterSnapshot, PendingResources, describe
from raydali.launch.driver.placement import Placement
from tests.support.messages import mentions

HEAD = (0.0, 0.0)
ASKED = Placement(3, 3, cpus=2, gpu=True, reachable=3)


def moment(
    nodes: list[tuple[float, float]], free: list[tuple[float, float]] | None = None, more: int = 4, **facts: Any
) -> ClusterSnapshot:
    group = AutoscalerCapacity((Group("gpu", cpus=2, gpus=1, more=more),), more=more) if more else AutoscalerCapacity()
    return ClusterSnapshot(
        nodes=tuple(nodes), free=tuple(nodes if free is None else free), growth=group, **{"starting": {}} | facts
    )


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (moment([HEAD]), "3 gpu nodes 0 of 3 workers"),
        (
            moment([HEAD, (2, 1)], more=3, starting={"gpu": 2}),
            "2 more gpu nodes; 1 of 3 workers 2 nodes",
        ),
        (
            moment([(2, 1)] * 3, [(2, 1), (0, 0), (0, 0)], more=0),
            "2 places 2 CPUs 1 GPU 2 of 3 GPUs 1 of 3 workers",
        ),
        (
            moment([(2, 1)] * 3, [(0, 0)] * 3, more=1),
            "1 more gpu node 2 places 2 CPUs 1 GPU 3 of 3 GPUs 0 of 3 workers",
        ),
        (
            moment([(2, 1)], more=0),
            "2 places 2 CPUs 1 GPU 1 of 3 workers",
        ),
        (
            moment([HEAD], failures=("the autoscaler could not start gpu: no quota",)),
            "3 more gpu nodes; 0 of 3 workers the autoscaler could not start gpu: no quota",
        ),
    ],
)
def test_what_is_waited_for(at: ClusterSnapshot, values: str) -> None:
    assert mentions(describe(at, ASKED), values)


@pytest.mark.parametrize("at", [moment([(2, 1)] * 3), moment([(2, 1)] * 3, [HEAD] * 3, placed=True)])
def test_nothing_is_said_once_all_is_there(at: ClusterSnapshot) -> None:
    assert describe(at, ASKED) == ""


def test_room_that_ray_does_not_give_is_said_after_a_while() -> None:
    at = moment([(2, 1)] * 4)
    assert describe(at, ASKED, seconds=10) == ""
    assert "3 workers" in describe(at, ASKED, seconds=60) and "room for 4" in describe(at, ASKED, seconds=60)


def test_lines_are_rate_limited_and_only_printed_while_waiting() -> None:
    now, said, at = 0.0, [], moment([HEAD])
    waiting = PendingResources(ASKED, lambda: at, lambda text: said.append((now, text)), lambda: now)

    def until(end: float) -> None:
        nonlocal now
        while now < end:
            now += 0.25
            waiting.poll()

    until(130)
    assert [when for when, _ in said] == [4, 64, 124]
    assert said[1][1].endswith("(64 s)")
    at = moment([HEAD, (2, 1)], more=3)
    until(140)
    assert [when for when, _ in said[3:]] == [132] and mentions(said[3][1], "2 gpu nodes")
    at = moment([(2, 1)] * 3, [HEAD] * 3, placed=True)
    until(142)
    at = moment([HEAD])  # placed once, it is silent
    until(300)
    assert len(said) == 4
    waiting.start()
    until(310)
    assert [when for when, _ in said[4:]] == [304]


def test_a_cluster_that_does_not_answer_does_not_end_the_run() -> None:
    now = 0.0

    def look() -> ClusterSnapshot:
        raise ConnectionError

    waiting = PendingResources(ASKED, look, lambda text: pytest.fail(text), lambda: now)
    for time in (2.0, 4.0, 100.0):
        now = time
        waiting.poll()
