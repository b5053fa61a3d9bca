"""What is asked of a cluster against what it has and what its autoscaler could add; none is started."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from raydali.errors import UsageError
from raydali.launch.driver import autoscaler
from raydali.launch.driver.autoscaler import config_on_head
from raydali.launch.driver.cluster import UNKNOWN, AutoscalerCapacity, Cluster, Group, growth_of
from raydali.launch.driver.placement import Placement, resolve_placement
from raydali.options.placement import PlacementOptions
from tests.support.messages import mentioning, mentions

CONFIG: dict[str, Any] = {
    "max_workers": 6,
    "head_node_type": "head",
    "available_node_types": {
        "head": {"resources": {"CPU": 4}, "max_workers": 0},
        "gpu": {"resources": {"CPU": 16, "GPU": 2}, "max_workers": 4},
        "spot": {"resources": {"CPU": 64, "GPU": 8}, "max_workers": 2},
        "cpu": {"resources": {"CPU": 32}, "max_workers": 10},
    },
}
ONE_GPU = AutoscalerCapacity((Group("gpu", cpus=2, gpus=1, more=4),), more=4)
HEAD = (0.0, 0.0)


def placed(nodes: list[tuple[float, float]], growth: AutoscalerCapacity, **options: Any) -> Placement:
    cluster = Cluster({str(number): shape for number, shape in enumerate(nodes)}, {}, growth)
    return resolve_placement(PlacementOptions(**options), cluster)


# ---------------------------------------------------------------------------------------------------------------------
# What could be added


@pytest.mark.parametrize(
    ("present", "more"),
    [
        ({"head": 1}, {"gpu": 4, "spot": 2, "cpu": 6}),
        ({"head": 1, "gpu": 3}, {"gpu": 1, "spot": 2, "cpu": 3}),
        ({"head": 1, "spot": 2, "cpu": 3}, {"gpu": 1, "cpu": 1}),
        ({"head": 1, "cpu": 6}, {}),
        ({"head": 1, "by hand": 5}, {"gpu": 1, "spot": 1, "cpu": 1}),
    ],
)
def test_what_an_autoscaler_could_add_beside_what_is_there(present: dict[str, int], more: dict[str, int]) -> None:
    assert {group.name: group.more for group in growth_of(CONFIG, Counter(present)).groups} == more


def test_without_an_autoscaler_nothing_can_be_added() -> None:
    assert growth_of(None, {}) == growth_of({}, {}) == AutoscalerCapacity()
    assert str(AutoscalerCapacity()) == ""


@pytest.mark.parametrize(
    ("workers", "gpu", "nodes", "held"),
    [
        (1, True, {"spot": 1}, 8),
        (8, True, {"spot": 1}, 8),
        (17, True, {"spot": 2, "gpu": 1}, 18),
        (100, True, {"spot": 2, "gpu": 4}, 24),  # six nodes in all
        (10, False, {"spot": 1}, 16),
        (100, False, {"spot": 2, "cpu": 4}, 64),
        (0, True, {}, 0),
    ],
)
def test_the_fewest_nodes_for_so_many_workers(workers: int, gpu: bool, nodes: dict[str, int], held: int) -> None:
    assert growth_of(CONFIG, {"head": 1}).nodes_for(workers, 4, gpu) == (nodes, held)


def test_growth_in_words() -> None:
    assert mentions(str(ONE_GPU), "4 nodes gpu 2 CPUs 1 GPU")
    both = growth_of(CONFIG, {"head": 1, "cpu": 4})
    assert re.findall(r"\d+", str(both)) == ["2", *("2", "16", "2"), *("2", "64", "8"), *("2", "32", "0")]
    assert re.findall(r"gpu|spot|cpu", str(both)) == ["gpu", "spot", "cpu"]


# ---------------------------------------------------------------------------------------------------------------------
# What is asked


def test_workers_go_where_nodes_are_still_to_come() -> None:
    assert placed([HEAD], ONE_GPU, workers="3") == Placement(3, 3, cpus=2, gpu=True, reachable=3)
    assert placed([HEAD], ONE_GPU, workers="3", no_gpu=True) == Placement(3, 3, cpus=2, gpu=False, reachable=3)
    assert placed([HEAD], ONE_GPU, workers="8", no_gpu=True) == Placement(8, 8, cpus=1, gpu=False, reachable=8)
    # No more than it may add is asked of an autoscaler, or it would add nothing.
    assert placed([HEAD], ONE_GPU, workers="1:8") == Placement(1, 8, cpus=2, gpu=True, reachable=4)
    assert placed([HEAD, (2, 1)], ONE_GPU, workers="1:8").reachable == 5
    # Without one, nodes may come by hand.
    assert placed([(2, 1)], AutoscalerCapacity(), workers="1:8") == Placement(1, 8, cpus=2, gpu=True, reachable=8)


def test_gpus_that_are_there_are_the_default_number_of_workers() -> None:
    assert placed([HEAD, (2, 1), (2, 1)], ONE_GPU).maximum == 2
    with pytest.raises(UsageError, match=mentioning("4 --workers")):
        placed([HEAD], ONE_GPU)


@pytest.mark.parametrize(
    ("options", "asked", "held", "remedy"),
    [
        ({"workers": "9"}, "9 workers of 2 CPUs and 1 GPU each", 4, "--workers 4 would fit"),
        ({"workers": "6:9"}, "6 workers of 2 CPUs and 1 GPU each", 4, "--workers 4:9 would fit"),
        (
            {"workers": "3", "cpus_per_worker": 5},
            "3 workers of 5 CPUs and 1 GPU each",
            0,
            "--cpus-per-worker 2 would fit",
        ),
        (
            {"workers": "5", "cpus_per_worker": 2, "no_gpu": True},
            "5 workers of 2 CPUs each",
            4,
            "--workers 4 or --cpus-per-worker 1 would fit",
        ),
        (
            {"workers": "7", "cpus_per_worker": 4},
            "7 workers of 4 CPUs and 1 GPU each",
            0,
            "--workers 4 --cpus-per-worker 2 would fit",
        ),
        ({"workers": "1", "cpus_per_worker": 3}, "1 worker of 3 CPUs and 1 GPU each", 0, "--cpus-per-worker 2"),
    ],
)
def test_what_can_never_be_met_is_refused_with_what_could(
    options: dict[str, Any], asked: str, held: int, remedy: str
) -> None:
    with pytest.raises(UsageError) as error:
        placed([HEAD], ONE_GPU, **options)
    assert mentions(str(error.value), "1 node 0 CPUs 0 GPUs autoscaler")
    assert f"room for {held} of {asked}: {remedy}" in str(error.value)


def test_the_nearest_that_is_named_does_fit() -> None:
    for workers in range(1, 12):
        for cpus in range(1, 6):
            options: dict[str, Any] = {"workers": str(workers), "cpus_per_worker": cpus}
            try:
                placed([HEAD, (3, 1)], ONE_GPU, **options)
            except UsageError as error:
                for remedy in str(error).rpartition(": ")[2].split(" would fit")[0].split(" or "):
                    words = remedy.split()
                    nearer = {
                        name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
                    }
                    nearer = options | nearer
                    assert placed(
                        [HEAD, (3, 1)], ONE_GPU, **nearer | {"cpus_per_worker": int(nearer["cpus_per_worker"])}
                    )


def test_what_nobody_knows_is_not_refused() -> None:
    assert placed([HEAD], UNKNOWN, workers="3", gpu=True, cpus_per_worker=4).reachable == 3
    assert not placed([HEAD], UNKNOWN, workers="3").gpu


# ---------------------------------------------------------------------------------------------------------------------
# Where an autoscaler's configuration is


def test_the_autoscaler_s_file_is_found_by_its_process(tmp_path: Path) -> None:
    (tmp_path / "monitor.py").write_text("import time\ntime.sleep(60)")
    (tmp_path / "config.yaml").write_text("max_workers: 3\n")
    command = [sys.executable, str(tmp_path / "monitor.py")]
    watching = subprocess.Popen([*command, "--gcs-address=192.0.2.1:1"])
    scaling = subprocess.Popen([*command, "--gcs-address=192.0.2.1:2", f"--autoscaling-config={tmp_path}/config.yaml"])
    broken = subprocess.Popen([*command, "--gcs-address=192.0.2.1:3", f"--autoscaling-config={tmp_path}/none.yaml"])
    try:
        assert config_on_head("192.0.2.1:1") is None
        assert config_on_head("192.0.2.1:2") == {"max_workers": 3}
        with pytest.raises(LookupError, match=r"none\.yaml cannot be read"):
            config_on_head("192.0.2.1:3")
        assert config_on_head("192.0.2.1:4") is None
    finally:
        for process in (watching, scaling, broken):
            process.kill()
            process.wait()


RAYCLUSTER: dict[str, Any] = {
    "metadata": {"name": "c", "namespace": "n"},
    "spec": {
        "enableInTreeAutoscaling": True,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0"},
            "template": {"spec": {"containers": [{"resources": {"limits": {"cpu": 2, "memory": "4Gi"}}}]}},
        },
        "workerGroupSpecs": [
            {
                "groupName": "gpu",
                "minReplicas": 0,
                "maxReplicas": 5,
                "rayStartParams": {},
                "template": {
                    "spec": {
                        "containers": [{"resources": {"limits": {"cpu": 8, "memory": "9Gi", "nvidia.com/gpu": 1}}}]
                    }
                },
            }
        ],
    },
}


def test_on_kubernetes_the_raycluster_says_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray.autoscaler._private.kuberay import node_provider

    class Client:
        def __init__(self, namespace: str) -> None:
            assert namespace == "n"

        def get(self, path: str) -> dict[str, Any]:
            assert path == "rayclusters/c"
            return cluster

    cluster = RAYCLUSTER
    (tmp_path / "namespace").write_text("n")
    monkeypatch.setattr(autoscaler, "KUBERNETES_NAMESPACE", tmp_path / "namespace")
    monkeypatch.setattr(node_provider, "KubernetesHttpApiClient", Client)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("RAY_CLUSTER_NAME", "c")
    found = growth_of(config_on_head("192.0.2.1:5"), {"headgroup": 1, "gpu": 2})
    assert found == AutoscalerCapacity((Group("gpu", cpus=8, gpus=1, more=3),), more=3)
    cluster = RAYCLUSTER | {"spec": RAYCLUSTER["spec"] | {"enableInTreeAutoscaling": False}}
    assert config_on_head("192.0.2.1:5") is None
    cluster = {}
    with pytest.raises(LookupError, match=mentioning("RayCluster")):
        config_on_head("192.0.2.1:5")
