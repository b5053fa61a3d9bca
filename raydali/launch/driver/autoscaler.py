"""Reads the configuration of a cluster's autoscaler.

Ray has no API for this in a running cluster. It is a file on the head's host, or on Kubernetes the RayCluster, and is
therefore read on the head.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from raydali.launch.driver.cluster import UNKNOWN, Growth, call_on_nodes, growth_of

HEAD_RESOURCE = "node:__internal_head__"
HEAD_SECONDS = 30
"""Timeout of the task on the head."""
KUBERNETES_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def read_growth() -> Growth:
    """Return how the connected cluster can grow; unknown if there may be an autoscaler that cannot be read."""
    import ray

    context = ray.get_runtime_context()
    heads = [node["NodeID"] for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"]]
    try:
        if context.get_node_id() in heads:
            return partial(growth_of, config_on_head(context.gcs_address))
        (answer,) = call_on_nodes(config_on_head, [(head, (context.gcs_address,)) for head in heads], HEAD_SECONDS)
    except (LookupError, ValueError):  # unreadable, or the head is gone
        return lambda _: UNKNOWN
    return (lambda _: UNKNOWN) if isinstance(answer, Exception) else partial(growth_of, answer)


def config_on_head(gcs_address: str) -> dict[str, Any] | None:
    """Return the configuration, in the format of `ray up`; must be called on the head's host, or in the head's pod.

    Returns:
        None without an autoscaler.

    Raises:
        LookupError: there may be one, but its configuration cannot be read.
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
