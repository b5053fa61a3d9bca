"""The environment of a worker group, recorded when it starts: versions, and the cores and GPUs of each node.

Host names, addresses and environment variables are not recorded.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from raydali.host.cpu_times import usable_cores
from raydali.host.facts import versions
from raydali.train.worker import Worker


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """The environment of one worker; `gpu` is None on a CPU."""

    node: str
    cores: int
    gpu: str | None
    versions: dict[str, str]


def worker_environment(worker: Worker) -> WorkerEnvironment:
    """Return the environment of this process; takes about 20 ms."""
    gpu = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else None
    return WorkerEnvironment(node=worker.node, cores=usable_cores(), gpu=gpu, versions=versions())


def environment(workers: Sequence[WorkerEnvironment]) -> dict[str, Any]:
    """Merge the environments of all workers.

    Returns:
        {"versions": {"torch": "2.15.0", ...}, "nodes": [{"node": "3f2a1b9c", "workers": 2, "cores": 16, "gpu": name or
        None}, ...]}. Versions that differ among workers are separated by commas; None if no worker has the package.
    """
    names = dict.fromkeys(name for worker in workers for name in worker.versions)
    found = {name: sorted({worker.versions.get(name, "") for worker in workers} - {""}) for name in names}
    nodes: dict[str, list[WorkerEnvironment]] = {}
    for worker in workers:
        nodes.setdefault(worker.node, []).append(worker)
    return {
        "versions": {name: ", ".join(numbers) or None for name, numbers in found.items()},
        "nodes": [
            {
                "node": node,
                "workers": len(group),
                "cores": group[0].cores,
                "gpu": ", ".join(sorted({worker.gpu for worker in group if worker.gpu})) or None,
            }
            for node, group in nodes.items()
        ],
    }
