"""What a worker group runs on: versions, and each node's cores and GPUs; part of the event of its start.

Nothing else of a node is told: no host name, no address, no variable of its environment.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raydali.host.cpu_times import usable_cores
from raydali.host.facts import versions
from raydali.train.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one worker has; `gpu` is None on a CPU."""

    node: str
    cores: int
    gpu: str | None
    versions: dict[str, str]


def place_of(worker: Worker) -> Place:
    """This process's; some 20 ms."""
    gpu = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else None
    return Place(node=worker.node, cores=usable_cores(), gpu=gpu, versions=versions())


def environment(places: Sequence[Place]) -> dict[str, Any]:
    """All workers' places put together.

    Returns:
        {"versions": {"torch": "2.15.0", ...}, "nodes": [{"node": "3f2a1b9c", "workers": 2, "cores": 16, "gpu": name or
        None}, ...]}. A version that differs among workers is a comma list, one that none of them has is None.
    """
    names = dict.fromkeys(name for place in places for name in place.versions)
    found = {name: sorted({place.versions.get(name, "") for place in places} - {""}) for name in names}
    nodes: dict[str, list[Place]] = {}
    for place in places:
        nodes.setdefault(place.node, []).append(place)
    return {
        "versions": {name: ", ".join(numbers) or None for name, numbers in found.items()},
        "nodes": [
            {
                "node": node,
                "workers": len(group),
                "cores": group[0].cores,
                "gpu": ", ".join(sorted({place.gpu for place in group if place.gpu})) or None,
            }
            for node, group in nodes.items()
        ],
    }
