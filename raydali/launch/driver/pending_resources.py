"""What a job waits for while its workers have no place yet, said at a calm rate."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raydali.launch.driver.autoscaler import AutoscalerCapacity, fitting, growth_of, present_groups
from raydali.launch.driver.placement import Cluster, Placement
from raydali.text import plural

POLL_SECONDS = 2.0
GRACE_SECONDS = 4.0
"""Without a word: most workers have their place by then."""
ROOM_SECONDS = 30.0
"""Without a word where there is room for the workers: Ray Train's controller takes its time to ask for it."""
CHANGE_SECONDS = 6.0
"""Between lines that say something new."""
REPEAT_SECONDS = 60.0
"""Between lines that say the same."""


@dataclass(frozen=True, kw_only=True)
class ClusterSnapshot:
    """The cluster while a job waits.

    Attributes:
        nodes: CPUs and GPUs of each node.
        free: what of them no job holds.
        growth: what the autoscaler could still add.
        starting: how many nodes of each group the autoscaler is adding.
        failures: what the autoscaler says of nodes that it could not add.
        placed: whether this job's workers have their places.
    """

    nodes: tuple[tuple[float, float], ...]
    free: tuple[tuple[float, float], ...]
    growth: AutoscalerCapacity
    starting: Mapping[str, int]
    failures: tuple[str, ...] = ()
    placed: bool = False


def in_words(moment: ClusterSnapshot, asked: Placement, seconds: float = 0.0) -> str:
    """Describe what the job waits for; empty where everything is there.

    Args:
        seconds: for how long it has waited.
    """
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
        wanted.append(f"{place}, other jobs hold {held_by_others:g} of {there:g} {unit}" if busy else place)
    text = f"waiting for {' and '.join(wanted)}; {have} of {need} workers would fit now"
    if coming:
        text += f", {plural(coming, 'node')} starting"
    return text + "".join(f"; {failure}" for failure in moment.failures)


class PendingResources:
    """Looks at the cluster now and then, until the workers are placed.

    Args:
        asked: what must find its place.
        look: gives the cluster as it is.
        say: takes a line.
        clock: seconds that never go back.
    """

    def __init__(
        self,
        asked: Placement,
        look: Callable[[], ClusterSnapshot],
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._asked, self._look, self._say, self._clock = asked, look, say, clock
        self.again()

    def again(self) -> None:
        """The workers have lost their places."""
        self._over = False
        self._began = self._looked = self._clock()
        self._spoke, self._said = self._began + GRACE_SECONDS - CHANGE_SECONDS, ""

    def over(self) -> None:
        """The workers run."""
        self._over = True

    def poll(self) -> None:
        """Look and say what there is to say, if it is time for it."""
        now = self._clock()
        if self._over or now - self._looked < POLL_SECONDS:
            return
        self._looked = now
        try:
            moment = self._look()
        except Exception:  # a line that cannot be said must not end the run
            return
        if moment.placed:
            self._over = True
            return
        text = in_words(moment, self._asked, now - self._began)
        since = now - self._spoke
        if text and since >= (CHANGE_SECONDS if text != self._said else REPEAT_SECONDS):
            self._say(f"{text} ({now - self._began:.0f} s)")
            self._spoke, self._said = now, text


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
        placed=_placed(),
    )


def _of(resources: Mapping[str, float]) -> tuple[float, float]:
    return resources.get("CPU", 0.0), resources.get("GPU", 0.0)


def _placed() -> bool:
    """Whether a placement group of this job has all its places."""
    import ray
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData as Group  # type: ignore[attr-defined]

    job = bytes.fromhex(ray.get_runtime_context().get_job_id())
    # ray.util.placement_group_table() does not say whose they are.
    for packed in ray._private.state.state._connect_and_get_accessor().get_placement_group_table():
        group = Group.FromString(packed)
        if group.creator_job_id == job and group.state == Group.CREATED:
            return True
    return False
