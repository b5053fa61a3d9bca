"""Where workers go: defaults and refusals of `place` on many clusters, none of which is started."""

from typing import Any

import pytest

from raydali.errors import UsageError
from raydali.launch.driver.cluster import Cluster
from raydali.launch.driver.own_ray import cpus_for
from raydali.launch.driver.placement import resolve_placement
from raydali.options.placement import PlacementOptions
from tests.support.messages import mentioning


def cluster(*nodes: tuple[float, float]) -> Cluster:
    """Of nodes of (CPUs, GPUs)."""
    return Cluster({str(number): shape for number, shape in enumerate(nodes)}, {})


def placed(nodes: list[tuple[float, float]], **options: Any) -> tuple[int, int, int, bool]:
    """Minimum and maximum of workers, CPUs of each, and whether each has a GPU."""
    placement = resolve_placement(PlacementOptions(**options), cluster(*nodes))
    return placement.minimum, placement.maximum, placement.cpus, placement.gpu


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([(2, 0)], (2, 2, 1, False)),
        ([(16, 0)], (2, 2, 8, False)),
        ([(17, 0)], (2, 2, 8, False)),
        ([(8, 0), (8, 0)], (2, 2, 8, False)),  # one worker a node
        ([(1, 0), (1, 0)], (2, 2, 1, False)),
        ([(0, 0), (4, 0)], (2, 2, 2, False)),  # a head that takes no work
        ([(16, 1)], (1, 1, 16, True)),
        ([(128, 8)], (8, 8, 16, True)),
        ([(12, 8)], (8, 8, 1, True)),
        ([(128, 8), (128, 8)], (16, 16, 16, True)),
        ([(8, 0), (64, 4)], (4, 4, 16, True)),  # a head without GPUs
        ([(64, 8), (64, 4)], (12, 12, 8, True)),  # the poorest GPU sets the share
        ([(8, 4), (256, 8)], (12, 12, 2, True)),
    ],
)
def test_defaults(nodes: list[tuple[float, float]], expected: tuple[int, int, int, bool]) -> None:
    assert placed(nodes) == expected


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        ([(16, 0)], {"workers": "1"}, (1, 1, 16, False)),
        ([(16, 0)], {"workers": "3"}, (3, 3, 5, False)),
        ([(16, 0), (16, 0)], {"workers": "3"}, (3, 3, 8, False)),  # 2 on one node, 1 on the other
        ([(10, 0), (6, 0)], {"workers": "3"}, (3, 3, 5, False)),
        ([(16, 0)], {"workers": "1:4"}, (1, 4, 4, False)),
        ([(2, 0)], {"workers": "1:4"}, (1, 4, 1, False)),  # may grow beyond what there is now
        ([(16, 0)], {"workers": "4", "cpus_per_worker": 2}, (4, 4, 2, False)),
        ([(16, 0)], {"workers": "4", "cpus_per_worker": 4}, (4, 4, 4, False)),
        ([(16, 0)], {"workers": "2:32", "cpus_per_worker": 8}, (2, 32, 8, False)),
        ([(16, 0)], {"cpus_per_worker": 3}, (2, 2, 3, False)),
        ([(16, 4)], {"no_gpu": True}, (2, 2, 8, False)),
        ([(16, 4)], {"gpu": True, "workers": "2"}, (2, 2, 4, True)),
        ([(16, 4)], {"workers": "1:8"}, (1, 8, 4, True)),
        ([(16, 4)], {"workers": "4", "cpus_per_worker": 1}, (4, 4, 1, True)),
        ([(64, 0), (16, 4)], {"no_gpu": True, "workers": "5"}, (5, 5, 16, False)),
        ([(4, 0), (4, 0)], {"no_gpu": True, "workers": "2"}, (2, 2, 4, False)),
    ],
)
def test_wishes(
    nodes: list[tuple[float, float]], options: dict[str, Any], expected: tuple[int, int, int, bool]
) -> None:
    assert placed(nodes, **options) == expected


@pytest.mark.parametrize(
    ("nodes", "options", "workers", "held"),
    [
        ([(2, 0)], {"workers": "4", "cpus_per_worker": 1}, "4 workers of 1 CPU each", 2),
        ([(16, 0)], {"workers": "2:8", "cpus_per_worker": 9}, "2 workers of 9 CPUs each", 1),
        # The sum would do, but no node has 12.
        ([(8, 0)] * 8, {"workers": "2", "cpus_per_worker": 12}, "2 workers of 12 CPUs each", 0),
        ([(12, 0), (12, 0)], {"workers": "3", "cpus_per_worker": 8}, "3 workers of 8 CPUs each", 2),
        ([(16, 4)], {"workers": "5"}, "5 workers of 4 CPUs and 1 GPU each", 4),
        # CPUs and GPUs enough, but not on the same node.
        ([(64, 0), (2, 4)], {"workers": "4", "cpus_per_worker": 4}, "4 workers of 4 CPUs and 1 GPU each", 0),
        ([(64, 8), (64, 8)], {"workers": "16", "cpus_per_worker": 9}, "16 workers of 9 CPUs and 1 GPU each", 14),
    ],
)
def test_what_does_not_fit_is_refused_with_both_figures(
    nodes: list[tuple[float, float]], options: dict[str, Any], workers: str, held: int
) -> None:
    with pytest.raises(UsageError, match=mentioning(f"{held} {workers} would fit")):
        placed(nodes, **options)


def test_gpus_where_there_are_none_are_refused() -> None:
    message = mentioning("--gpu 2 nodes 12 CPUs 0 GPUs")
    for options in ({}, {"workers": "2"}, {"workers": "1:2", "cpus_per_worker": 1}):
        with pytest.raises(UsageError, match=message):
            placed([(8, 0), (4, 0)], gpu=True, **options)


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
@pytest.mark.parametrize("options", [{}, {"workers": "1"}, {"workers": "3"}, {"workers": "2:8"}], ids=str)
def test_a_ray_of_our_own_is_given_what_its_workers_need(
    monkeypatch: pytest.MonkeyPatch, cores: int, options: dict[str, Any]
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    cpus = cpus_for(PlacementOptions(**options))
    assert cpus >= cores
    assert placed([(cpus, 0)], **options)[:2] == (PlacementOptions(**options).worker_range or (2, 2))


def test_a_ray_of_our_own_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(4)))
    assert cpus_for(PlacementOptions(workers="2:32")) == 32
    assert cpus_for(PlacementOptions(workers="8", cpus_per_worker=4)) == 32
    for options in ({"workers": "33"}, {"workers": "1:33"}, {"workers": "3", "cpus_per_worker": 11}):
        with pytest.raises(UsageError, match=mentioning("4 32 --workers")):
            cpus_for(PlacementOptions(**options))


def test_how_many_workers_fit_is_counted_node_by_node() -> None:
    mixed = cluster((8, 0), (16, 2), (3.5, 4))
    assert [mixed.fitting(cpus, gpu=False) for cpus in (1, 3, 8, 9, 16, 17)] == [27, 8, 3, 1, 1, 0]
    assert [mixed.fitting(cpus, gpu=True) for cpus in (1, 3, 8, 9, 16, 17)] == [5, 3, 2, 1, 1, 0]
    assert mixed.gpus == 6


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ([(2, 0)], "1 node, 2 CPUs, 0 GPUs"),
        ([(1, 1)], "1 node, 1 CPU, 1 GPU"),
        ([(2, 0), (64, 8)], "2 nodes, 66 CPUs, 8 GPUs"),
        ([(3.5, 0.5)], "1 node, 3.5 CPUs, 0 GPUs"),
    ],
)
def test_a_cluster_in_words(nodes: list[tuple[float, float]], text: str) -> None:
    assert str(cluster(*nodes)) == text
