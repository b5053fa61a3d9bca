"""How many workers the next group has: what is free, once that has settled."""

from raydali.launch.driver import group_size
from raydali.launch.driver.group_size import GroupSize
from raydali.launch.driver.placement import Placement


class Cluster:
    """Nodes with CPUs, all and free ones, and a clock, which a test changes."""

    def __init__(self) -> None:
        self.nodes = {"a": (2.0, 2.0), "b": (1.0, 1.0)}
        self.now = 0.0

    def resources(self) -> group_size.Resources:
        return {node: ({"CPU": all_}, {"CPU": free}) for node, (all_, free) in self.nodes.items()}

    def sizes(self, minimum: int, maximum: int) -> GroupSize:
        return GroupSize(Placement(minimum, maximum, 1, False, maximum), self.resources, lambda: self.now)

    def next_of(self, size: GroupSize, *left_out: str, seconds: float = group_size.LOOK_SECONDS) -> int | None:
        self.now += seconds
        return size.of_next(left_out)


def test_elastic_groups_take_what_is_free_once_that_has_settled() -> None:
    cluster = Cluster()
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
    assert Cluster().sizes(9, 9).of_next(()) == 9


def test_a_group_grows_at_times() -> None:
    cluster = Cluster()
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
    size = Cluster().sizes(1, 300)
    before = size.placement_seconds(2)
    assert 3 <= before < size.placement_seconds(300)
    size.ended(placed=False)
    assert size.placement_seconds(2) == 2 * before
    for _ in range(20):
        size.ended(placed=False)
    assert size.placement_seconds(2) == group_size.MAX_PLACEMENT_SECONDS
    size.started()
    assert size.placement_seconds(2) == before
