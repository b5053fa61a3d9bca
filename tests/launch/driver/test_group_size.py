"""The room for the next group: how many workers fit into what is free, and what a job says while none do."""

from typing import Any

import pytest

from raydali.launch.driver import group_size
from raydali.launch.driver.cluster import AutoscalerCapacity, Cluster, Group, Shape
from raydali.launch.driver.group_size import GroupSize, Waiting, describe_waiting
from raydali.launch.driver.placement import Placement
from tests.support.messages import mentions

HEAD = (0.0, 0.0)
ASKED = Placement(3, 3, cpus=2, gpu=True, reachable=3)


class Nodes:
    """Nodes with CPUs, all and free ones, and a clock, which a test changes."""

    def __init__(self) -> None:
        self.nodes = {"a": (2.0, 2.0), "b": (1.0, 1.0)}
        self.now = 0.0

    def look(self) -> Cluster:
        shapes = self.nodes.items()
        return Cluster({node: (all_, 0) for node, (all_, _) in shapes}, {node: (free, 0) for node, (_, free) in shapes})

    def sizes(self, minimum: int, maximum: int) -> GroupSize:
        return GroupSize(Placement(minimum, maximum, 1, False, maximum), self.look, lambda: self.now)

    def next_of(self, size: GroupSize, *left_out: str, seconds: float = group_size.LOOK_SECONDS) -> int | None:
        self.now += seconds
        return size.of_next(left_out)


def test_elastic_groups_take_what_is_free_once_that_has_settled() -> None:
    cluster = Nodes()
    size = cluster.sizes(1, 3)
    assert cluster.next_of(size) == 3
    cluster.nodes["a"] = 2.0, 1.0
    assert cluster.next_of(size) is None  # a dead group's places may come free
    assert cluster.next_of(size, seconds=group_size.SETTLE_SECONDS) == 2
    cluster.nodes["a"] = 2.0, 2.0
    assert cluster.next_of(size) == 3
    assert cluster.next_of(size, "a") == 1
    del cluster.nodes["a"], cluster.nodes["b"]
    assert cluster.next_of(size) is None
    assert size.missing(0) == 3


def test_a_fixed_group_does_not_wait_for_what_is_free() -> None:
    assert Nodes().sizes(9, 9).of_next(()) == 9


def test_a_group_grows_at_times() -> None:
    cluster = Nodes()
    size = cluster.sizes(1, 3)
    cluster.nodes["a"] = 2.0, 0.0
    size.started()
    assert size.of_larger(2, ()) is None
    cluster.now += group_size.GROW_SECONDS
    assert size.of_larger(2, ("b",)) is None
    cluster.now += group_size.GROW_SECONDS
    assert size.of_larger(2, ()) == 3
    assert size.of_larger(3, ()) is None


def test_groups_that_were_not_placed_get_more_time() -> None:
    size = Nodes().sizes(1, 300)
    before = size.placement_seconds(2)
    assert 3 <= before < size.placement_seconds(300)
    size.ended(placed=False)
    assert size.placement_seconds(2) == 2 * before
    for _ in range(20):
        size.ended(placed=False)
    assert size.placement_seconds(2) == group_size.MAX_PLACEMENT_SECONDS
    size.started()
    assert size.placement_seconds(2) == before


def moment(nodes: list[Shape], free: list[Shape] | None = None, more: int = 4, **facts: Any) -> Cluster:
    group = AutoscalerCapacity((Group("gpu", cpus=2, gpus=1, more=more),), more=more) if more else AutoscalerCapacity()
    by_id, free_by_id = ({str(number): shape for number, shape in enumerate(each)} for each in (nodes, free or nodes))
    return Cluster(by_id, free_by_id, group, **facts)


@pytest.mark.parametrize(
    ("at", "values"),
    [
        (moment([HEAD]), "3 gpu nodes 0 of 3 workers"),
        (
            moment([HEAD, (2, 1)], more=3, starting=2),
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
def test_what_is_waited_for(at: Cluster, values: str) -> None:
    assert mentions(describe_waiting(at, ASKED), values)


def test_room_that_ray_does_not_give_is_said_after_a_while() -> None:
    at = moment([(2, 1)] * 4)
    assert describe_waiting(at, ASKED) == describe_waiting(at, ASKED, seconds=10) == ""
    after_a_minute = describe_waiting(at, ASKED, seconds=60)
    assert "3 workers" in after_a_minute and "room for 4" in after_a_minute


def test_lines_are_rate_limited_and_only_printed_while_waiting() -> None:
    now, said, at, is_placed = 0.0, list[tuple[float, str]](), moment([HEAD]), False

    def begun() -> Waiting:
        facts = ASKED, lambda: at, lambda: is_placed, lambda text: said.append((now, text))
        return Waiting(*facts, now=lambda: now)

    waiting = begun()

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
    is_placed = True
    until(142)
    at, is_placed = moment([HEAD]), False  # placed once, it is silent
    until(300)
    assert len(said) == 4
    waiting = begun()
    until(310)
    assert [when for when, _ in said[4:]] == [304]


def test_a_cluster_that_does_not_answer_does_not_end_the_run() -> None:
    now = 0.0

    def look() -> Cluster:
        raise ConnectionError

    waiting = Waiting(ASKED, look, lambda: False, lambda text: pytest.fail(text), now=lambda: now)
    for time in (2.0, 4.0, 100.0):
        now = time
        waiting.poll()
