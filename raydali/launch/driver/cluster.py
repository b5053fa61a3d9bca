"""The nodes of the cluster: what is free on them, what its autoscaler could add, and how a function runs on them."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any, TypeVar

from raydali.text import plural

RECENT_SECONDS = 60.0
"""How long a node that the autoscaler could not start is worth a message."""
T = TypeVar("T")
Shape = tuple[float, float]
"""CPUs and GPUs of a node."""


def fitting(nodes: Iterable[Shape], cpus: int, gpu: bool) -> int:
    """Return how many workers of `cpus` CPUs, and with `gpu` one GPU, fit into these nodes."""
    return sum(floor(min(has / cpus, gpus) if gpu else has / cpus) for has, gpus in nodes)


@dataclass(frozen=True)
class Group:
    """A group of equal nodes, of which the autoscaler may start `more`."""

    name: str
    cpus: float
    gpus: float
    more: int

    def fitting(self, cpus: int, gpu: bool) -> int:
        """Return how many workers one such node holds."""
        return fitting([(self.cpus, self.gpus)], cpus, gpu)


@dataclass(frozen=True)
class AutoscalerCapacity:
    """The nodes that may be added, at most `more` over all groups; `known` is false if that could not be found out."""

    groups: tuple[Group, ...] = ()
    more: int = 0
    known: bool = True

    def nodes_for(self, workers: int, cpus: int, gpu: bool) -> tuple[dict[str, int], int]:
        """Return the fewest nodes of each group for this number of further workers, and how many they hold."""
        nodes: dict[str, int] = {}
        held, addable = 0, self.more
        for group in sorted(self.groups, key=lambda group: -group.fitting(cpus, gpu)):
            per_node = group.fitting(cpus, gpu)
            number = min(group.more, addable, ceil((workers - held) / per_node)) if per_node and workers > held else 0
            if number > 0:
                nodes[group.name] = number
                held, addable = held + number * per_node, addable - number
        return nodes, held

    def fitting(self, cpus: int, gpu: bool) -> int:
        """Return how many workers all nodes that may be added hold."""
        return self.nodes_for(1 << 30, cpus, gpu)[1]

    @property
    def gpus(self) -> int:
        """GPUs of the `more` nodes that have most of them."""
        gpus = sorted((group.gpus for group in self.groups for _ in range(group.more)), reverse=True)
        return int(sum(gpus[: self.more]))

    def __str__(self) -> str:
        if not self.known:
            return "what its autoscaler can add is not known"
        if not self.groups:
            return ""
        kinds = " and ".join(
            f"{group.more} {group.name} of {plural(group.cpus, 'CPU')} and {plural(group.gpus, 'GPU')}"
            for group in self.groups
        )
        return f"its autoscaler can add {plural(self.more, 'node')}: {'up to ' if len(self.groups) > 1 else ''}{kinds}"


NO_GROWTH = AutoscalerCapacity()
UNKNOWN = AutoscalerCapacity(known=False)
Growth = Callable[[Mapping[str, int]], AutoscalerCapacity]
"""Returns the nodes that may be added to those that are present, whose number it takes by the name of their group."""


def growth_of(config: Mapping[str, Any] | None, present: Mapping[str, int]) -> AutoscalerCapacity:
    """Return the nodes that may be added to those that are present.

    Args:
        config: in the format of `ray up`; None without an autoscaler.
        present: number of nodes by the name of their group, the head's included.
    """
    if not config:
        return NO_GROWTH
    head = config.get("head_node_type")
    workers = sum(number for name, number in present.items() if name != head)
    more = max(0, int(config.get("max_workers", 0)) - workers)
    groups = []
    for name, kind in config.get("available_node_types", {}).items():
        addable = min(more, int(kind.get("max_workers", more)) - present.get(name, 0))
        if name != head and addable > 0:
            groups.append(Group(name, *_shape(kind.get("resources") or {}), addable))
    return AutoscalerCapacity(tuple(groups), min(more, sum(group.more for group in groups)))


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster at a moment.

    Attributes:
        nodes: CPUs and GPUs of each node, by its id.
        free: the part of them that no job holds.
        growth: what the autoscaler could still add.
        starting: how many nodes it is adding.
        failures: its messages about nodes that it could not add.
    """

    nodes: Mapping[str, Shape]
    free: Mapping[str, Shape]
    growth: AutoscalerCapacity = NO_GROWTH
    starting: int = 0
    failures: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return int(sum(gpus for _, gpus in self.nodes.values()))

    @property
    def gpus_at_most(self) -> int:
        """GPUs of all nodes, with those that the autoscaler could add."""
        return self.gpus + self.growth.gpus

    @property
    def kinds(self) -> list[Shape]:
        """CPUs and GPUs of every present node, and of each group that may grow."""
        return [*self.nodes.values(), *((group.cpus, group.gpus) for group in self.growth.groups)]

    def fitting(self, cpus: int, gpu: bool, left_out: Collection[str] = ()) -> int:
        """Return how many workers of `cpus` CPUs, and with `gpu` one GPU, the other nodes hold when idle."""
        return fitting((shape for node, shape in self.nodes.items() if node not in left_out), cpus, gpu)

    def fitting_now(self, cpus: int, gpu: bool, left_out: Collection[str] = ()) -> int:
        """Return how many of them fit into what is free."""
        return fitting((shape for node, shape in self.free.items() if node not in left_out), cpus, gpu)

    def reachable(self, cpus: int, gpu: bool, left_out: Collection[str] = ()) -> int:
        """Return how many of them fit with all that the autoscaler could add."""
        return self.fitting(cpus, gpu, left_out) + self.growth.fitting(cpus, gpu)

    def __str__(self) -> str:
        cpus = sum(cpus for cpus, _ in self.nodes.values())
        now = f"{plural(len(self.nodes), 'node')}, {plural(cpus, 'CPU')}, {plural(self.gpus, 'GPU')}"
        return "; ".join(filter(None, (now, str(self.growth))))


def connected_cluster(growth: Growth) -> Cluster:
    """Return the present state of the connected cluster."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    nodes = [*status.active_nodes, *status.idle_nodes]
    recent = time.time() - RECENT_SECONDS
    failures = {
        f"the autoscaler could not start {launch.ray_node_type_name}: {launch.details}"
        for launch in status.failed_launches
        if (launch.failed_ts_s or 0) > recent
    }
    return Cluster(
        nodes={node.node_id or "": _shape(node.total_resources()) for node in nodes},
        free={node.node_id or "": _shape(node.available_resources()) for node in nodes},
        # Of the two places where Ray keeps the name of a group, the labels are wrong for nodes on the head's host.
        growth=growth(Counter(node.ray_node_type_name for node in nodes)),
        starting=len(status.pending_nodes) + sum(launch.count for launch in status.pending_launches),
        failures=tuple(sorted(failures)),
    )


def _shape(resources: Mapping[str, Any]) -> Shape:
    return float(resources.get("CPU", 0)), float(resources.get("GPU", 0))


def call_on_nodes(
    function: Callable[..., T], calls: Sequence[tuple[str, tuple[object, ...]]], seconds: float
) -> list[T | Exception]:
    """Call a function on nodes at the same time. It is ended where it takes longer.

    Args:
        function: can be imported on the nodes, or be pickled by value.
        calls: the id of a node, and the arguments there, for each call.
        seconds: the limit for all of them.

    Returns:
        What the function has returned, or why there is no answer, for each call.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(function)
    references = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*arguments)
        for node, arguments in calls
    ]
    ray.wait(references, num_returns=len(references), timeout=seconds)
    answers: list[T | Exception] = []
    for reference in references:
        try:
            answers.append(ray.get(reference, timeout=0))
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayError) as error:
            ray.cancel(reference, force=True)
            answers.append(error)
    return answers
