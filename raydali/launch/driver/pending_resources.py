"""Reports what a job waits for while its workers cannot be placed."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raydali.launch.driver.autoscaler import AutoscalerCapacity, fitting, growth_of, present_groups
from raydali.launch.driver.placement import Cluster, Placement
from raydali.launch.trainer import has_places
from raydali.text import plural

POLL_SECONDS = 2.0
GRACE_SECONDS = 4.0
"""No report before this: most workers are placed by then."""
ROOM_SECONDS = 30.0
"""The same if there is room for the workers, since Ray Train takes a while to request it."""
CHANGE_SECONDS = 6.0
"""Minimum interval between different reports."""
REPEAT_SECONDS = 60.0
"""Interval between equal reports."""


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """The cluster while a job waits.

    Attributes:
        nodes: CPUs and GPUs of each node.
        free: the part of them that no job holds.
        growth: the capacity that the autoscaler could still add.
        starting: how many nodes of each group the autoscaler is adding.
        failures: the autoscaler's messages about nodes that it could not add.
        placed: whether this job's workers are placed.
    """

    nodes: tuple[tuple[float, float], ...]
    free: tuple[tuple[float, float], ...]
    growth: AutoscalerCapacity
    starting: Mapping[str, int]
    failures: tuple[str, ...] = ()
    placed: bool = False


def describe(moment: ClusterSnapshot, asked: Placement, seconds: float = 0.0) -> str:
    """Describe what the job has waited for during these seconds; empty if everything is available."""
    need, shape = asked.minimum, (asked.cpus, asked.gpu)
    have = sum(fitting(c, g, *shape) for c, g in moment.free)
    if moment.placed:
        return ""
    if have >= need:
        unplaced = f"waiting for Ray to place {plural(need, 'worker')} of {asked}: there is room for {have}"
        return unplaced if seconds >= ROOM_SECONDS else ""
    missing = need - have
    nodes, held = moment.growth.nodes_for(missing, *shape)
    wanted = [plural(number, f"more {group} node") for group, number in nodes.items()]
    coming = sum(number for group, number in moment.starting.items() if number)
    if held < missing:  # the rest is there or nowhere
        place = f"{plural(missing - held, 'place')} for workers of {asked}"
        busy = sum(fitting(c, g, *shape) for c, g in moment.nodes) > have
        unit, index = ("GPUs", 1) if asked.gpu else ("CPUs", 0)
        there = sum(node[index] for node in moment.nodes)
        held_by_others = there - sum(node[index] for node in moment.free)
        wanted.append(f"{place} (other jobs hold {held_by_others:g} of {there:g} {unit})" if busy else place)
    text = f"waiting for {' and '.join(wanted)}; {have} of {plural(need, 'worker')} would fit now"
    if coming:
        text += f", {plural(coming, 'node')} starting"
    return text + "".join(f"; {failure}" for failure in moment.failures)


class PendingResources:
    """Polls the cluster until the workers are placed.

    Args:
        asked: the requested placement.
        take_snapshot: returns the current state of the cluster.
        print_line: takes a line for the console.
        clock: a monotonic clock.

    Attributes:
        is_over: whether the workers are placed.
    """

    def __init__(
        self,
        asked: Placement,
        take_snapshot: Callable[[], ClusterSnapshot],
        print_line: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._asked, self._take_snapshot, self._print_line, self._clock = asked, take_snapshot, print_line, clock
        self.start()

    def start(self, pause: float = 0.0) -> None:
        """Start polling after a pause: the workers are gone."""
        self.is_over = False
        self._began = self._polled = self._clock() + pause
        self._reported_at, self._reported = self._began + GRACE_SECONDS - CHANGE_SECONDS, ""

    def stop(self) -> None:
        """Stop polling: the workers run."""
        self.is_over = True

    def poll(self) -> None:
        """Poll the cluster and report, if it is time to."""
        now = self._clock()
        if self.is_over or now - self._polled < POLL_SECONDS:
            return
        self._polled = now
        try:
            moment = self._take_snapshot()
        except Exception:  # a missing report must not end the run
            return
        if moment.placed:
            self.is_over = True
            return
        text = describe(moment, self._asked, now - self._began)
        since = now - self._reported_at
        if text and since >= (CHANGE_SECONDS if text != self._reported else REPEAT_SECONDS):
            self._print_line(f"{text} ({now - self._began:.0f} s)")
            self._reported_at, self._reported = now, text


def cluster_snapshot(cluster: Cluster) -> ClusterSnapshot:
    """Return the present state of the connected cluster."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    growth = (
        growth_of(cluster.autoscaler, present_groups(nodes))
        if cluster.growth.known
        else AutoscalerCapacity(known=False)
    )
    starting: Counter[str] = Counter(node.ray_node_type_name for node in status.pending_nodes)
    for launch in status.pending_launches:
        starting[launch.ray_node_type_name] += launch.count
    recent = time.time() - REPEAT_SECONDS
    failures = {
        f"the autoscaler could not start {launch.ray_node_type_name}: {launch.details}"
        for launch in status.failed_launches
        if (launch.failed_ts_s or 0) > recent
    }
    return ClusterSnapshot(
        nodes=tuple(_of(node.total_resources()) for node in nodes),
        free=tuple(_of(node.available_resources()) for node in nodes),
        growth=growth,
        starting=starting,
        failures=tuple(sorted(failures)),
        placed=has_places(),
    )


def _of(resources: Mapping[str, float]) -> tuple[float, float]:
    return resources.get("CPU", 0.0), resources.get("GPU", 0.0)
