"""The inspection of every node of the cluster at RAY_ADDRESS, by one actor per node that reserves no CPU."""

import logging
import os
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from raydali.commands.doctor.storage import Marker
from raydali.host.checks import Node
from raydali.host.facts import Host, this_host
from raydali.launch.driver.ray_cluster import answering_ray
from raydali.text import error_line

ANSWER_SECONDS = 60
"""Time limit for all nodes together; each starts a process, and may have to download raydali first."""
CLOCK_CALLS = 5
PACKAGE: dict[str, Any] = {"py_modules": [str(Path(__file__).parents[2])], "excludes": ["**/__pycache__"]}
"""Runtime environment that ships raydali to the nodes."""


class Probe:
    """Actor that inspects its node."""

    def host(self) -> Host:
        """Return the facts about the node."""
        return this_host()

    def clock(self) -> float:
        """Return the node's time, in seconds since 1970."""
        return time.time()

    def storage(self, marker: Marker) -> str:
        """Return the reason why the node cannot use the storage; empty if it can."""
        return marker.read_error()


def nodes_of_cluster(storage: str | None) -> list[Node]:
    """Inspect every node that is alive.

    Raises:
        UsageError: no Ray answers at RAY_ADDRESS.
    """
    import ray

    # Nodes may lack raydali. A job's package contains it; otherwise this folder is sent.
    send = None if os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") else PACKAGE
    with answering_ray():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, runtime_env=send)
    try:
        return _inspect([node for node in ray.nodes() if node["Alive"]], storage)
    finally:
        ray.shutdown()


def _inspect(alive: list[dict[str, Any]], storage: str | None) -> list[Node]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    marker = Marker(storage, uuid.uuid4().hex) if storage is not None else None
    wrong = marker.write_error() if marker is not None else ""
    probes, answers = {}, {}
    for node in alive:
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        actor: Any = ray.remote(Probe)
        probe = actor.options(num_cpus=0, scheduling_strategy=here).remote()
        probes[node["NodeID"]] = probe
        answers[node["NodeID"]] = probe.host.remote()
    deadline = time.monotonic() + ANSWER_SECONDS
    hosts = Counter(node["NodeManagerHostname"] for node in alive)
    nodes = []
    for node in alive:
        key, name = node["NodeID"], node["NodeManagerHostname"]
        if hosts[name] > 1:  # several nodes on one host
            name = f"{name} ({key[:4]}...{key[-4:]})"
        left = max(1.0, deadline - time.monotonic())
        try:
            host = ray.get(answers[key], timeout=left)
            seen: str | None = None
            if marker is not None:
                seen = wrong or ray.get(probes[key].storage.remote(marker), timeout=left)
            nodes.append(Node(name=name, host=host, skew=_skew(probes[key]), storage=seen))
        except ray.exceptions.GetTimeoutError:
            nodes.append(Node(name=name, silence=f"no answer within {ANSWER_SECONDS} s"))
        except ray.exceptions.RayError as error:
            nodes.append(Node(name=name, silence=error_line(error)))
    if marker is not None:
        marker.remove()
    return nodes


def _skew(probe: Any) -> tuple[float, float]:  # noqa: ANN401 (an actor of Ray)
    """Return by how many seconds the node's clock is ahead of this one's, and the maximum error of this value."""
    import ray

    best = (0.0, float("inf"))
    for _ in range(CLOCK_CALLS):
        began = time.time()
        there = ray.get(probe.clock.remote(), timeout=10)
        ended = time.time()
        if (ended - began) / 2 < best[1]:
            best = there - (began + ended) / 2, (ended - began) / 2
    return best
