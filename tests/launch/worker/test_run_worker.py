"""What a worker group runs on, as its start tells it."""

from typing import Any

import pytest
import torch

from raydali.host.hardware import cpu_facts
from raydali.launch.worker.run_worker import environment, worker_environment, worker_error
from raydali.training.worker import Worker

MACHINE = {"cpu": "AMD EPYC 7B13", "memory": 2**34}
VERSIONS = {"python": "3.11.7", "torch": "2.15.0", "nvidia-dali-cuda120": ""}


def test_this_process_has_cores_and_versions() -> None:
    worker = worker_environment(Worker(rank=0, world_size=1, device=torch.device("cpu"), cpus=1, node="3f2a1b9c"))
    assert worker["node"] == "3f2a1b9c" and worker["cores"] >= 1 and worker["gpu"] is None
    assert worker["memory"] > 2**28 and worker["cpu"] == cpu_facts().get("model name")
    assert worker["versions"]["torch"] == torch.__version__.partition("+")[0] and worker["versions"]["ray"]


def test_workers_are_grouped_by_node_and_both_versions_named() -> None:
    gpu = "NVIDIA H200"
    workers: list[dict[str, Any]] = [
        {"node": node, "cores": 16, **MACHINE, "gpu": gpu, "versions": VERSIONS} for node in ("a", "b", "b")
    ]
    workers.append({"node": "c", "cores": 4, **MACHINE, "gpu": None, "versions": VERSIONS | {"torch": "2.11.0"}})
    assert environment(workers) == {
        "versions": {"python": "3.11.7", "torch": "2.11.0, 2.15.0", "nvidia-dali-cuda120": None},
        "nodes": [
            {"node": "a", "workers": 1, "cores": 16, **MACHINE, "gpu": gpu},
            {"node": "b", "workers": 2, "cores": 16, **MACHINE, "gpu": gpu},
            {"node": "c", "workers": 1, "cores": 4, **MACHINE, "gpu": None},
        ],
    }


@pytest.mark.parametrize(("step", "is_final"), [(0, True), (7, False)])
def test_a_model_that_never_fitted_is_not_started_again(step: int, is_final: bool) -> None:
    """After a step the memory may be that of another process, which ends."""
    found = worker_error(torch.OutOfMemoryError("CUDA out of memory"), rank=0, step=step, group="", node_id="")
    assert (found.final, found.usage) == (is_final, is_final)
    expected = "the model does not fit into the GPU's memory before the first step: give a smaller one"
    assert found.error.startswith(expected if is_final else "torch.OutOfMemoryError: CUDA out of memory")
