"""The capacity that a cluster's autoscaler could add: groups of nodes, and how many more of each.

Ray has no API for this in a running cluster. It is in the autoscaler's configuration, a file on the head's host, or on
Kubernetes the RayCluster, which is therefore read on the head.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Any

import psutil

from raydali.launch.driver.on_nodes import call_on_nodes
from raydali.text import plural

HEAD_RESOURCE = "node:__internal_head__"
HEAD_SECONDS = 30
"""Timeout of the task on the head that reads the configuration."""
KUBERNETES_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Group:
    """A group of equal nodes, of which the autoscaler may start `more`."""

    name: str
    cpus: float
    gpus: float
    more: int

    def fitting(self, cpus: int, gpu: bool) -> int:
        """Return how many workers one such node holds."""
        return fitting(self.cpus, self.gpus, cpus, gpu)


@dataclass(frozen=True)
class AutoscalerCapacity:
    """The nodes that may be added, at most `more` over all groups; `known` is false if that could not be found out."""

    groups: tuple[Group, ...] = ()
    more: int = 0
    known: bool = True

    def nodes_for(self, workers: int, cpus: int, gpu: bool) -> tuple[dict[str, int], int]:
        """Return the fewest nodes of each group for this number of further workers, and how many they hold."""
        nodes: dict[str, int] = {}
        held, left = 0, self.more
        for group in sorted(self.groups, key=lambda group: -group.fitting(cpus, gpu)):
            each = group.fitting(cpus, gpu)
            number = min(group.more, left, ceil((workers - held) / each)) if each and workers > held else 0
            if number > 0:
                nodes[group.name] = number
                held, left = held + number * each, left - number
        return nodes, held

    def fitting(self, cpus: int, gpu: bool) -> int:
        """Return how many workers all nodes that may be added hold."""
        return self.nodes_for(1 << 30, cpus, gpu)[1]

    @property
    def gpus(self) -> int:
        """GPUs of the `more` nodes that have most of them."""
        each = sorted((group.gpus for group in self.groups for _ in range(group.more)), reverse=True)
        return int(sum(each[: self.more]))

    def __str__(self) -> str:
        if not self.known:
            return "what its autoscaler can add is not known"
        if not self.groups:
            return ""
        kinds = " and ".join(
            f"{group.more} {group.name} of {plural(group.cpus, 'CPU')} and {plural(group.gpus, 'GPU')}"
            for group in self.groups
        )
        return f"its autoscaler can add {plural(self.more, 'node')}: {'up to ' * (len(self.groups) > 1)}{kinds}"


NO_GROWTH = AutoscalerCapacity()
UNKNOWN = AutoscalerCapacity(known=False)


def fitting(cpus_there: float, gpus_there: float, cpus: int, gpu: bool) -> int:
    """Return how many workers of `cpus` CPUs, and with `gpu` one GPU, fit into these resources of a node."""
    return floor(min(cpus_there / cpus, gpus_there) if gpu else cpus_there / cpus)


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
        resources = kind.get("resources") or {}
        left = min(more, int(kind.get("max_workers", more)) - present.get(name, 0))
        if name != head and left > 0:
            groups.append(Group(name, float(resources.get("CPU", 0)), float(resources.get("GPU", 0)), left))
    return AutoscalerCapacity(tuple(groups), min(more, sum(group.more for group in groups)))


def present_groups(nodes: Iterable[Any]) -> Counter[str]:
    """Count nodes by the name of their group, from the NodeInfo of Ray's autoscaler for living nodes."""
    # Of the two places where Ray keeps this name, the labels are wrong for nodes that share a host with the head.
    return Counter(node.ray_node_type_name for node in nodes)


def read_config() -> dict[str, Any] | None:
    """Return the configuration of the connected cluster's autoscaler; None if it has none.

    Raises:
        LookupError: there may be one, but its configuration cannot be read.
    """
    import ray

    context = ray.get_runtime_context()
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"]]
    if not heads:
        raise LookupError("the head's node is not alive")
    if context.get_node_id() == heads[0]:
        return config_on_head(context.gcs_address)
    (answer,) = call_on_nodes(config_on_head, [(heads[0], (context.gcs_address,))], HEAD_SECONDS)
    if answer.error:
        raise LookupError(f"the head did not answer: {answer.error}")
    return answer.result


def config_on_head(gcs_address: str) -> dict[str, Any] | None:
    """Return the configuration as `read_config` does; must be called on the head's host, or in the head's pod.

    Raises:
        LookupError: see `read_config`.
    """
    file = _file_of_monitor(gcs_address)
    if file:
        import yaml

        try:
            config: dict[str, Any] = yaml.safe_load(Path(file).expanduser().read_text())
        except (OSError, yaml.YAMLError) as error:
            raise LookupError(f"{file} cannot be read: {error}") from error
        return config
    if file is None and os.environ.get("KUBERNETES_SERVICE_HOST") and os.environ.get("RAY_CLUSTER_NAME"):
        return _config_of_raycluster(os.environ["RAY_CLUSTER_NAME"])
    return None


def _file_of_monitor(gcs_address: str) -> str | None:
    """Return the file that this cluster's autoscaler reads: empty if it only monitors, None without one."""
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        options = dict(word[2:].split("=", 1) for word in words if word.startswith("--") and "=" in word)
        if any(word.endswith("/monitor.py") for word in words) and options.get("gcs-address") == gcs_address:
            return options.get("autoscaling-config", "")
    return None


def _config_of_raycluster(name: str) -> dict[str, Any] | None:
    """Return the configuration that KubeRay's autoscaler, in the head's pod, derives from the RayCluster."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.kuberay.node_provider import KubernetesHttpApiClient

    try:
        client = KubernetesHttpApiClient(namespace=KUBERNETES_NAMESPACE.read_text().strip())
        cluster = client.get(f"rayclusters/{name}")
        if not cluster["spec"].get("enableInTreeAutoscaling"):
            return None
        config: dict[str, Any] = _derive_autoscaling_config_from_ray_cr(cluster)
    except Exception as error:  # the network, rights, or a field of a newer KubeRay
        raise LookupError(f"the RayCluster {name} cannot be read: {error}") from error
    return config
