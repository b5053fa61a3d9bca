"""The verdict on lines written by hand: what each cause costs, and which is named."""

from dataclasses import dataclass
from typing import Any

import pytest

from raydali.measure.records import RankRecord
from raydali.measure.verdict import CAUSES, Verdict, verdict
from raydali.options.every_job import TrainingOptions
from tests.support import records
from tests.support.messages import mentions


def rank(number: int = 0, world_size: int = 1, **measured: Any) -> RankRecord:
    """One that trained on 1,000 images in 10 s at the ceiling, in 100 steps, on cores of which half were idle."""
    healthy: dict[str, Any] = {
        "images": 1000,
        "loss_sum": 1.0,
        "seconds": 10.0,
        "loader_wait_seconds": 0.2,
        "step_seconds": 9.7,
        "checkpoint_seconds": 0.05,
        "device": "cuda",
        "steps": 100,
        "exchange_seconds": 0.5 if world_size > 1 else None,
        "shortest_exchange_seconds": 0.004 if world_size > 1 else None,
        "cpu_seconds": 10.0,
        "cpu_queued_seconds": 0.1,
        "helpers_seconds": 5.0,
        "helpers_queued_seconds": 0.0,
        "host_busy_seconds": 10.5 * world_size,
        "host_idle_seconds": 10.5 * world_size,
    }
    return records.rank_record(number, world_size, **(healthy | measured))


def line(*ranks: RankRecord, ceiling: float | None = 103.0, validation: float = 0.3, **facts: Any) -> dict[str, Any]:
    of_all = ceiling * len(ranks) if ceiling else None
    return records.epoch_line(ranks, validation={"seconds": validation}, ceiling_images_per_second=of_all, **facts)


def judged(*ranks: RankRecord, **facts: Any) -> Verdict:
    found = verdict(line(*ranks, **facts))
    assert found is not None
    assert all(0 < cost <= 1 for cost in found.costs.values())
    return found


def test_healthy_runs_are_step_bound() -> None:
    alone = judged(rank())
    assert alone.kind == "step-bound"
    assert alone.text.startswith("step-bound: 97% of the ceiling")
    assert judged(*(rank(i, 8) for i in range(8))).kind == "step-bound"
    unmeasured = judged(rank(), ceiling=None)
    assert unmeasured.kind == "step-bound" and mentions(unmeasured.text, "ceiling not known")


def test_a_gpu_that_waits_for_launches_is_launch_bound() -> None:
    """Its ceiling, of the same launches, is no higher. The larger cost is named."""
    found = judged(rank(), gpu_busy=0.45)
    assert found.kind == "launch-bound" and mentions(found.text, "launch-bound 45%")
    assert judged(rank(), gpu_busy=0.85).kind == "step-bound"
    assert judged(rank(seconds=20.0, loader_wait_seconds=10.0), gpu_busy=0.45).kind == "loader-bound"
    assert judged(rank(seconds=12.0, loader_wait_seconds=2.0), gpu_busy=0.45).kind == "launch-bound"


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("storage", "loader-bound by storage: ranks waited 50% of the time for data"),
        ("python", "loader-bound by Python: "),
        ("cpu decode", "loader-bound by decoding on the CPU: "),
        ("gpu decode", "loader-bound by decoding on the GPU: "),
    ],
)
def test_waiting_for_the_loader_is_put_down_to_what_held_it_up(cause: str, words: str) -> None:
    waits = {"storage": 0.1, "python": 0.1, "cpu decode": 0.1, "gpu decode": 0.1} | {cause: 5.0}
    ranks = [rank(i, 2, seconds=20.0, loader_wait_seconds=10.0, step_seconds=9.8, loader_waits=waits) for i in range(2)]
    found = judged(*ranks)
    assert (found.kind, found.cause) == ("loader-bound", cause)
    assert found.text.startswith(words)
    assert found.costs[cause] == pytest.approx(10 / 20.3 * 5.0 / 5.3, rel=0.05)
    record = line(*ranks)
    assert record["verdict"] == found.text and record["costs"] == found.costs
    assert record["loader_images_per_second"] == record["images_per_second"] == 100.0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_loader_python_that_runs_during_steps_slows_them(device: str) -> None:
    slow: dict[str, Any] = {"device": device, "seconds": 20.0, "step_seconds": 19.7}
    found = judged(rank(**slow, loader_waits={"python": 0.1, "storage": 0.1}, python_seconds=9.0))
    assert (found.kind, found.cause) == ("loader-bound", "python")
    assert found.costs["python"] == pytest.approx(9.0 / 20.3, abs=0.01)
    assert found.costs["gpu contention" if device == "cuda" else "slower steps"] == pytest.approx(1 / 20.3, abs=0.01)


def test_python_during_steps_at_ceiling_speed_is_not_blamed() -> None:
    assert judged(rank(python_seconds=9.0)).kind == "step-bound"


def test_a_loader_that_cannot_tell_is_named_all_the_same() -> None:
    found = judged(rank(seconds=20.0, loader_wait_seconds=10.0))
    assert (found.kind, found.cause) == ("loader-bound", "loader")
    assert found.text.startswith("loader-bound: ")


def test_a_rank_whose_steps_are_slow() -> None:
    others = [rank(i, 4, seconds=15.0, step_seconds=14.7, exchange_seconds=5.5) for i in range(3)]
    late = rank(3, 4, node="b", seconds=15.0, step_seconds=14.7, exchange_seconds=0.4)
    found = judged(*others, late)
    assert found.kind == "straggler"
    assert found.text.startswith("straggler, rank 3 on node b: ") and mentions(found.text, "33% steps slow")
    assert found.costs["straggler"] == pytest.approx(5.1 / 15.3, abs=0.01)
    assert found.costs.get("contention", 0) < 0.02


def test_a_rank_whose_loader_is_slow() -> None:
    others = [rank(i, 3, seconds=15.0, step_seconds=14.7, exchange_seconds=5.5) for i in range(2)]
    waits = {"storage": 5.0}
    late = rank(2, 3, seconds=15.0, loader_wait_seconds=5.2, loader_waits=waits, exchange_seconds=0.4, step_seconds=9.7)
    found = judged(*others, late)
    assert found.kind == "straggler" and "rank 2" in found.text and mentions(found.text, "loader 5.2 s")
    assert found.costs.get("storage", 0) < 0.02


@pytest.mark.parametrize("others", [1, 7])
def test_a_rank_that_waits_for_cores_is_contended_and_no_straggler(others: int) -> None:
    waiting = [
        rank(i, others + 1, device="cpu", seconds=15.0, step_seconds=14.7, exchange_seconds=5.5) for i in range(others)
    ]
    late: dict[str, Any] = {"device": "cpu", "seconds": 15.0, "step_seconds": 14.7, "exchange_seconds": 0.4}
    of_machine = {"host_busy_seconds": 29.0, "host_idle_seconds": 1.0}
    found = judged(*waiting, rank(others, others + 1, node="b", **late, **of_machine, cpu_queued_seconds=4.5))
    assert found.text.startswith("CPU contention: other processes used 66% of the CPU time on node b, ")
    assert found.costs["contention"] == pytest.approx(5.1 / 15.3, abs=0.05) and "straggler" not in found.costs
    few = rank(others, others + 1, node="b", **late, **of_machine, cpu_queued_seconds=2.0)
    assert judged(*waiting, few).kind == "straggler"
    on_gpu = [rank(i, others + 1, seconds=15.0, step_seconds=14.7, exchange_seconds=5.5) for i in range(others)]
    assert (
        judged(*on_gpu, rank(others, others + 1, **late | {"device": "cuda"}, cpu_queued_seconds=4.5)).kind
        == "straggler"
    )


def test_a_loader_that_waits_for_cores_is_no_straggler() -> None:
    others = [rank(i, 3, seconds=15.0, step_seconds=14.7, exchange_seconds=5.5) for i in range(2)]
    late: dict[str, Any] = {"seconds": 15.0, "loader_wait_seconds": 5.2, "exchange_seconds": 0.4, "step_seconds": 9.7}
    late |= {"loader_waits": {"storage": 5.0}, "host_busy_seconds": 29.0, "host_idle_seconds": 1.0}
    assert judged(*others, rank(2, 3, **late, helpers_queued_seconds=1.0)).kind == "straggler"
    assert judged(*others, rank(2, 3, **late, helpers_queued_seconds=9.0)).kind == "contention"


def test_a_loader_slightly_slower_than_others_is_no_straggler() -> None:
    """Of loaders that are too slow alike, only the last one is waited for: the others catch up meanwhile."""
    waits = {"cpu decode": 5.0}
    other = rank(0, 2, seconds=15.0, step_seconds=14.7, exchange_seconds=5.5, device="cpu")
    late: dict[str, Any] = {"seconds": 15.0, "loader_wait_seconds": 5.2, "loader_waits": waits, "exchange_seconds": 0.4}
    found = judged(other, rank(1, 2, **late, device="cpu"))
    assert (found.kind, found.cause) == ("loader-bound", "cpu decode")
    assert judged(other, rank(1, 2, **late, device="cpu", helpers_seconds=9.0)).kind == "straggler"
    waiting_too = rank(0, 2, seconds=15.0, loader_wait_seconds=1.2, step_seconds=13.7, exchange_seconds=4.5)
    waiting_too.loader_waits = waits
    assert judged(waiting_too, rank(1, 2, **late | {"loader_waits": {"storage": 5.0}})).kind == "loader-bound"


def test_in_a_cuda_graph_only_the_loader_shows_a_straggler() -> None:
    untimed: dict[str, Any] = {"exchange_seconds": None, "shortest_exchange_seconds": None, "seconds": 15.0}
    others = [rank(i, 3, step_seconds=14.7, **untimed) for i in range(2)]
    assert judged(*others, rank(2, 3, step_seconds=9.5, loader_wait_seconds=5.2, **untimed)).kind == "straggler"
    assert judged(*others, rank(2, 3, step_seconds=14.7, **untimed), ceiling=68.0).kind == "step-bound"


def test_a_rank_with_more_micro_batches_is_no_straggler() -> None:
    more = rank(0, 2, images=2000, seconds=20.0, step_seconds=19.5, exchange_seconds=0.5)
    fewer = rank(1, 2, seconds=20.0, step_seconds=19.5, exchange_seconds=10.0)
    assert "straggler" not in judged(more, fewer, ceiling=None).costs


def test_mutual_waits_do_not_blame_a_loader_with_short_waits() -> None:
    ranks = [rank(i, 2, step_seconds=9.7, exchange_seconds=2.0) for i in range(2)]
    found = judged(*ranks, ceiling=120.0)
    assert found.kind == "step-bound" and found.costs["loader"] == pytest.approx(2 * 0.2 / 10.3, abs=0.001)


def test_waits_of_one_rank_and_then_another_cost_both() -> None:
    ranks = [
        rank(i, 2, seconds=14.0, loader_wait_seconds=2.2, step_seconds=11.7, exchange_seconds=2.5) for i in range(2)
    ]
    assert judged(*ranks).costs["loader"] == pytest.approx(4.2 / 14.3, abs=0.02)


def test_exchanging_gradients() -> None:
    ranks = [
        rank(i, 2, seconds=20.0, step_seconds=19.6, exchange_seconds=10.0, shortest_exchange_seconds=0.09)
        for i in range(2)
    ]
    found = judged(*ranks, ceiling=51.5)
    assert found.kind == "communication"
    assert found.costs["communication"] == pytest.approx(9 / 20.3, abs=0.001)
    assert found.text.startswith("communication: all-reduces took")
    sharded = verdict(line(*ranks, ceiling=51.5), TrainingOptions(shard="all"))
    assert sharded is not None and sharded.text.startswith(
        "communication: gathering weights and summing gradients took"
    )


def test_a_loader_in_the_way_of_a_gpu_s_steps() -> None:
    found = judged(rank(seconds=14.0, step_seconds=13.7))
    assert found.text.startswith("GPU contention: ")
    assert found.costs["gpu contention"] == pytest.approx((13.7 - 1000 / 103) / 14.3, abs=0.001)


def test_reading_that_lacks_cores_is_no_gpu_contention() -> None:
    slow: dict[str, Any] = {"seconds": 20.0, "loader_wait_seconds": 10.2, "loader_waits": {"storage": 10.0}}
    busy: dict[str, Any] = {"cpu_seconds": 39.0, "host_busy_seconds": 40.0, "host_idle_seconds": 0.5}
    found = judged(rank(**slow, **busy, helpers_queued_seconds=9.0))
    assert (found.kind, found.costs.get("gpu contention", 0.0)) == ("contention", 0.0)
    assert found.text.startswith("CPU contention: ")


def test_cores_that_others_took() -> None:
    found = judged(
        rank(
            device="cpu",
            seconds=20.0,
            step_seconds=19.7,
            cpu_queued_seconds=9.0,
            host_busy_seconds=40.0,
            host_idle_seconds=0.5,
        ),
        ceiling=51.0,  # measured while they were at it
    )
    assert found.text.startswith("CPU contention: other processes used 75% of the CPU time")


def test_own_cores_that_do_not_suffice() -> None:
    found = judged(
        rank(
            device="cpu",
            seconds=20.0,
            step_seconds=19.7,
            cpu_queued_seconds=9.0,
            cpu_seconds=39.0,
            host_busy_seconds=40.0,
            host_idle_seconds=0.5,
        )
    )
    assert found.text.startswith("CPU contention: the model and the loader ")


def test_reading_that_waits_for_cores_is_contention() -> None:
    slow: dict[str, Any] = {"seconds": 20.0, "loader_wait_seconds": 10.2, "loader_waits": {"storage": 10.0}}
    busy: dict[str, Any] = {"cpu_seconds": 39.0, "host_busy_seconds": 40.0, "host_idle_seconds": 0.5}
    assert judged(rank(device="cpu", **slow)).cause == "storage"
    assert judged(rank(device="cpu", **slow, **busy, helpers_queued_seconds=9.0)).cause == "contention"
    assert judged(rank(device="cpu", **slow, **busy, helpers_queued_seconds=2.0)).cause == "storage"


def test_slow_steps_without_queueing_are_no_contention() -> None:
    found = judged(rank(device="cpu", seconds=100.0, step_seconds=99.7))
    assert found.kind == "slower steps" and "contention" not in found.text


def test_start_up_and_compile() -> None:
    slow_start = judged(rank(seconds=20.0, loader_wait_seconds=10.2, first_batch_seconds=10.0))
    assert slow_start.kind == "start-up" and slow_start.costs["start-up"] == pytest.approx(10 / 20.3, abs=0.001)
    compiled = judged(
        rank(seconds=40.0, step_seconds=39.7, first_batch_seconds=0.1, first_step_seconds=30.1), ceiling=None
    )
    assert compiled.kind == "compile" and compiled.costs["compile"] == pytest.approx(30 / 40.3, abs=0.01)


def test_one_ranks_late_first_batch_is_start_up() -> None:
    late: dict[str, Any] = {"seconds": 20.0, "loader_wait_seconds": 10.2, "first_batch_seconds": 10.0}
    early: dict[str, Any] = {"loader_wait_seconds": 1.2, "first_batch_seconds": 1.0, "seconds": 20.0}
    waiting: dict[str, Any] = {"step_seconds": 18.7, "exchange_seconds": 9.5}
    first_step: dict[str, Any] = {"first_step_seconds": 0.1}
    found = judged(rank(0, 2, **early, **waiting, **first_step), rank(1, 2, **late, **first_step))
    assert found.kind == "start-up" and sum(found.costs.values()) < 0.6
    assert found.costs["start-up"] == pytest.approx(10 / 20.3, abs=0.001)


def test_one_rank_that_compiles_longer() -> None:
    late = rank(0, 2, seconds=40.0, step_seconds=39.7, first_batch_seconds=0.1, first_step_seconds=30.1)
    waiting: dict[str, Any] = {"first_batch_seconds": 0.1, "first_step_seconds": 0.1, "exchange_seconds": 30.5}
    found = judged(late, rank(1, 2, seconds=40.0, step_seconds=39.7, **waiting))
    assert found.kind == "compile" and found.costs["compile"] == pytest.approx(30 / 40.3, abs=0.01)
    assert sum(found.costs.values()) < 0.85


def test_a_checkpoint_of_rank_0_is_not_blamed_on_other_loaders() -> None:
    first = rank(0, 8, seconds=15.0, checkpoint_seconds=5.05, loader_waits={"storage": 0.2})
    waiting: dict[str, Any] = {"seconds": 15.0, "step_seconds": 14.7, "exchange_seconds": 5.5}
    others = [rank(i, 8, **waiting, checkpoint_seconds=0.0, loader_waits={"storage": 0.2}) for i in range(1, 8)]
    found = judged(first, *others)
    assert found.kind == "checkpoint" and found.costs["checkpoint"] == pytest.approx(5.05 / 15.3, abs=0.001)
    assert sum(found.costs.values()) < 0.5


def test_a_late_first_batch_does_not_make_a_loader_straggler() -> None:
    started: dict[str, Any] = {"seconds": 25.0, "first_batch_seconds": 5.0, "loader_wait_seconds": 5.2}
    others = [rank(i, 3, **started, step_seconds=19.7, exchange_seconds=10.4) for i in range(2)]
    found = judged(*others, rank(2, 3, **started, step_seconds=19.7, exchange_seconds=0.4))
    assert found.kind == "straggler" and mentions(found.text, "steps slow")


def test_validation_checkpoints_and_short_epochs() -> None:
    assert judged(rank(), validation=10.0).kind == "validation"
    assert judged(rank(seconds=15.0, checkpoint_seconds=5.0)).kind == "checkpoint"
    short: dict[str, Any] = {"images": 40, "steps": 4, "seconds": 5.0, "step_seconds": 4.0, "loader_wait_seconds": 0.0}
    found = judged(rank(**short, checkpoint_seconds=1.0), validation=4.0, ceiling=10.0)
    assert found.kind == "short epochs" and mentions(found.text, "4 steps in 9.0 s 56%")
    assert judged(rank(**short), validation=1.0, ceiling=10.0).kind != "short epochs"


def test_too_short_an_epoch_is_not_judged() -> None:
    waiting: dict[str, Any] = {
        "steps": 29,
        "step_seconds": 0.3,
        "loader_wait_seconds": 0.2,
        "loader_waits": {"storage": 0.2},
    }
    assert judged(rank(seconds=0.6, **waiting), ceiling=None, validation=0.0).kind == "short epochs"
    assert judged(rank(seconds=1.0, **waiting), ceiling=None, validation=0.0).kind == "loader-bound"
    assert judged(rank(seconds=0.6, **waiting | {"steps": 30}), ceiling=None, validation=0.0).kind == "loader-bound"


def test_waiting_costs_no_more_than_the_ceiling_leaves() -> None:
    """All-reduces inside a CUDA graph are timed by samples: their differences are no proof of waiting."""
    ranks = [
        rank(i, 4, loader_wait_seconds=0.39, loader_waits={"storage": 0.39}, step_seconds=9.6, exchange_seconds=1.4)
        for i in range(4)
    ]
    unbounded, bounded = judged(*ranks, ceiling=None), judged(*ranks, ceiling=104.0)
    assert (unbounded.kind, unbounded.cause) == ("loader-bound", "storage")
    assert mentions(unbounded.text, "data 4% 10%")
    assert bounded.kind == "step-bound" and bounded.costs["storage"] < 0.04
    assert bounded.text.startswith("step-bound: 96% of the ceiling, ")


@pytest.mark.parametrize("kind", ["validation", "checkpoint"])
@pytest.mark.parametrize("more", [-0.01, 0.01])
def test_a_cause_is_named_from_its_share_on(kind: str, more: float) -> None:
    share = CAUSES[kind].blamed_from + more
    lost = 10 * share / (1 - share)
    if kind == "checkpoint":
        found = judged(rank(seconds=10.0 + lost, checkpoint_seconds=lost), validation=0.0)
    else:
        found = judged(rank(), validation=lost)
    assert found.kind == (kind if more > 0 else "step-bound")


def test_where_nothing_was_trained_there_is_no_verdict() -> None:
    record = line(rank(images=0, seconds=0.0))
    assert record["verdict"] is None and record["costs"] is None


def test_of_several_worker_groups_the_last_one_is_judged() -> None:
    slow = rank(seconds=20.0, loader_wait_seconds=10.0)
    record = records.epoch_line([slow], [rank(i, 2) for i in range(2)], ceiling_images_per_second=206.0)
    assert record["verdict"].startswith("step-bound: ")


@dataclass(frozen=True)
class DataOptions:
    data: str
    cache: str | None


def test_a_bucket_that_refuses_is_named_with_a_cache_as_the_remedy() -> None:
    slow: dict[str, Any] = {"seconds": 20.0, "loader_wait_seconds": 10.2, "loader_waits": {"storage": 10.0}}
    row = line(rank(**slow, storage={"requests": 900, "repeated": 1713, "hits": 0, "peer_hits": 0}))
    for cache, remedy in ((None, "--cache DIR"), ("/mnt/cache", "a copy of the data on local disks")):
        found = verdict(row, DataOptions(data="s3://bucket/train", cache=cache))
        assert found is not None and found.cause == "storage"
        assert mentions(found.text, f"the bucket refused or broke 1,713 requests Try {remedy}")
