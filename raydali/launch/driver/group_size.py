"""The number of workers of the next group: a fixed one, or with MIN:MAX as many as there are resources for.

Runs of MIN:MAX workers use the resources that other jobs leave free, at a start and every minute.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping

from raydali.launch.driver.autoscaler import fitting
from raydali.launch.driver.placement import Placement
from raydali.launch.trainer import START_TIMEOUT

SETTLE_SECONDS = 5.0
"""Time for the resources of a dead worker group to become free, before a smaller group is started."""
LOOK_SECONDS = 0.5
GROW_SECONDS = 60.0
"""Interval at which a group that trains looks for resources for more workers."""
PLACEMENT_SECONDS = {False: 60.0, True: 3.0}
"""How long a group waits for its places, if its size is fixed or not: what was free may be taken, or its node dead."""
WORKERS_A_SECOND = 50
"""Number of workers placed per second, which is added to this time."""
MAX_PLACEMENT_SECONDS = 120.0
Resources = Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]]
"""The resources of each node, and those of them that are free."""


class GroupSize:
    """Chooses the number of workers.

    Args:
        placement: what was asked for.
        resources: returns those of the living nodes.
        now: a monotonic clock.
    """

    def __init__(
        self,
        placement: Placement,
        resources: Callable[[], Resources] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement, self._resources, self._now = placement, resources or node_resources, now
        self._looked_at = self._grown_at = float("-inf")
        self._scarce_since: float | None = None
        self._not_placed = 0

    def of_next(self, left_out: Collection[str]) -> int | None:
        """Return the size of a group that may start now, without these nodes; None while there is no room for it."""
        asked, now = self._placement, self._now()
        if not asked.is_elastic:
            return asked.minimum
        if now - self._looked_at < LOOK_SECONDS:
            return None
        self._looked_at = now
        free, all_ = self._fitting(left_out)
        if free == all_:
            self._scarce_since = None
        elif self._scarce_since is None:
            self._scarce_since = now
        may_settle = self._scarce_since is not None and now - self._scarce_since < SETTLE_SECONDS
        return free if free >= asked.minimum and not may_settle else None

    def missing(self, workers: int) -> int:
        """Return how many workers a group of this size lacks."""
        return self._placement.reachable - workers

    def of_larger(self, workers: int, left_out: Collection[str]) -> int | None:
        """Return the size to which a group of so many workers can grow, looked for at times; None if it cannot."""
        asked, now = self._placement, self._now()
        if workers >= asked.reachable or now - self._grown_at < GROW_SECONDS:
            return None
        self._grown_at = now
        size = min(asked.reachable, workers + self._fitting(left_out)[0])
        return size if size > workers else None

    def placement_seconds(self, workers: int) -> float:
        """Return how long a group may wait for its places: longer for a large one, and if earlier ones got none."""
        seconds = float(os.environ.get(START_TIMEOUT, PLACEMENT_SECONDS[self._placement.is_elastic]))
        longer = (seconds + workers / WORKERS_A_SECOND) * 2.0**self._not_placed
        return max(seconds, min(longer, MAX_PLACEMENT_SECONDS))

    def started(self) -> None:
        """Note that a group trains."""
        self._not_placed, self._grown_at = 0, self._now()

    def ended(self, *, placed: bool) -> None:
        """Note that a group has ended, or got no places in its time."""
        self._scarce_since = None
        if not placed:
            self._not_placed = min(self._not_placed + 1, 10)

    def _fitting(self, left_out: Collection[str]) -> tuple[int, int]:
        """Return how many workers fit into free resources, and into all."""
        nodes = [had for node, had in self._resources().items() if node not in left_out]
        return self._workers_in(free for _, free in nodes), self._workers_in(all_ for all_, _ in nodes)

    def _workers_in(self, nodes: Iterable[Mapping[str, float]]) -> int:
        asked = self._placement
        each = (fitting(has.get("CPU", 0.0), has.get("GPU", 0.0), asked.cpus, asked.gpu) for has in nodes)
        return min(sum(each), asked.reachable)


def node_resources() -> Resources:
    """Return the resources of the living nodes of the connected cluster."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    return {node.node_id or "": (node.total_resources(), node.available_resources()) for node in nodes}
