"""Which ranks are found to hold up a run, and what the heartbeats of a worker contain."""

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.worker import reporting
from raydali.launch.worker.reporting import HeartbeatThread
from raydali.run.messages import HEARTBEAT_SECONDS, Heartbeat, HeartbeatEnded, Message
from raydali.training.worker import Worker
from tests.support.ranks import run_ranks


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(
    watch: HangWatch,
    clock: Clock,
    seconds: float,
    counts: dict[int, Any],
    stack: str | None = None,
    progress: dict[int, float] | None = None,
    waiting: tuple[int, ...] = (),
) -> list[Any]:
    """Let time pass with a heartbeat of each rank every HEARTBEAT_SECONDS; return the ranks that are found stuck."""
    found: list[Any] = []
    end = clock.now + seconds
    while clock.now < end:
        clock.now += HEARTBEAT_SECONDS
        for rank, count in counts.items():
            taken = count(clock.now) if callable(count) else count
            message = Heartbeat(
                rank=rank,
                group="g",
                node="n",
                node_id="nn",
                pid=rank + 1,
                started=1,
                count=taken,
                progress=progress[rank] if progress else taken,
                stack=stack,
                waits=rank in waiting,
            )
            watch.heartbeat(message)
        found += watch.stuck()
    return found


def test_a_run_that_gets_on_is_left_alone() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 0, clock)
    watch.training_started()
    assert run(watch, clock, 1000, {0: int, 1: int}) == []


def test_a_start_has_its_own_timeout_whatever_batches_it_takes() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 300, clock)
    assert run(watch, clock, 298, {0: 1, 1: int}) == []
    (stuck,) = run(watch, clock, 20, {0: 1, 1: int}, stack="read(...)", progress={0: 0.0, 1: 0.5})
    assert stuck.rank == 0 and stuck.stack == "read(...)"
    clock.now += 1000
    watch = HangWatch(2, 60, 300, clock)
    assert run(watch, clock, 298, {0: 1, 1: 1}) == [], "a start takes its time from its group's first beat"


def test_a_start_that_may_take_for_ever() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 0, clock)
    assert run(watch, clock, 10_000, {0: 0, 1: 0}) == []


def test_who_only_waits_for_others_is_not_named_unless_all_do() -> None:
    clock = Clock()
    watch = HangWatch(3, 60, 60, clock)
    (stuck,) = run(watch, clock, 64, {0: 0, 1: 0, 2: 0}, waiting=(0, 2))
    assert stuck.rank == 1
    watch.training_started()
    all_of_them = run(watch, clock, 64, {0: 4, 1: 4, 2: 4}, waiting=(0, 1, 2))
    assert [each.rank for each in all_of_them] == [0, 1, 2]


def test_a_frozen_process_is_named() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 0, clock)
    watch.training_started()
    run(watch, clock, 100, {0: int, 1: int, 2: int})
    (stuck,) = run(watch, clock, 64, {0: 100, 2: 100})
    assert stuck.rank == 1 and stuck.frozen and stuck.stack is None


def test_the_rank_that_did_least_is_named_with_its_stack() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 0, clock)
    watch.training_started()
    (stuck,) = run(watch, clock, 64, {0: 31, 1: 30, 2: 31}, stack="read(...)")
    assert stuck.rank == 1 and not stuck.frozen and stuck.stack == "read(...)"


def test_a_process_that_freezes_after_the_first_step_is_named() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 0, clock)
    run(watch, clock, 20, {0: 0, 1: 0})
    watch.training_started()
    (stuck,) = run(watch, clock, 64, {0: 3})
    assert stuck.rank == 1 and stuck.frozen


def test_validation_batches_and_larger_shares_blame_nobody() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 0, clock)
    watch.training_started()
    (stuck,) = run(watch, clock, 64, {0: 40, 1: 60, 2: 41}, progress={0: 31.5, 1: 31.0, 2: 31.5})
    assert stuck.rank == 1


def test_it_is_said_once_in_a_timeout() -> None:
    clock = Clock()
    watch = HangWatch(1, 60, 0, clock)
    watch.training_started()
    assert len(run(watch, clock, 100, {0: 3})) == 1
    assert len(run(watch, clock, 30, {0: 3})) == 1


def test_a_group_whose_workers_do_not_all_report_is_late() -> None:
    clock = Clock()
    watch = HangWatch(2, 60, 300, clock)
    clock.now = 1000
    assert not watch.is_late(), "it has no places yet"
    watch.group_placed()
    assert run(watch, clock, 200, {0: 1}) == [] and not watch.is_late()
    clock.now += 200
    assert watch.is_late() and not watch.is_late()
    run(watch, clock, 2, {0: 1, 1: 1})
    clock.now += 400
    assert not watch.is_late()


def test_a_timeout_of_0_is_none() -> None:
    clock = Clock()
    watch = HangWatch(1, 0, 60, clock)
    watch.training_started()
    assert run(watch, clock, 10_000, {0: 3}) == []


def test_a_heartbeat_reports_progress_and_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeats: list[Heartbeat] = []
    messages: list[Message] = []
    monkeypatch.setattr(reporting, "HEARTBEAT_SECONDS", 0.02)
    count, stuck = itertools.chain([1, 2, 3], itertools.repeat(3)), threading.Event()

    def emit(message: Message) -> None:
        messages.append(message)
        if isinstance(message, Heartbeat):
            heartbeats.append(message)
            if message.stack:
                stuck.set()

    thread = HeartbeatThread(emit, lambda: next(count), lambda: 7.5, 0.2, rank=4, group="g", node="n", node_id="nn")
    assert stuck.wait(120)
    thread.close()
    first, last = heartbeats[0], heartbeats[-1]
    assert [each.count for each in heartbeats[:3]] == [1, 2, 3]
    assert (first.pid, first.rank, first.progress, first.stack) == (os.getpid(), 4, 7.5, None)
    assert last.stack is not None and "stuck.wait(120)" in last.stack and not last.waits
    time.sleep(0.1)
    assert messages[-1] == HeartbeatEnded(rank=4, group="g", node_id="nn", pid=os.getpid()), "it goes on"


def wait_at_a_barrier(seen: Path) -> None:
    """Rank 1 comes once a heartbeat of rank 0 says that it waits."""
    vars(reporting)["HEARTBEAT_SECONDS"] = 0.02
    worker = Worker.join(torch.device("cpu"), cpus=1, node="")
    while worker.rank == 1 and not seen.exists():
        time.sleep(0.02)

    def emit(message: Message) -> None:
        if isinstance(message, Heartbeat) and message.waits:
            seen.touch()

    thread = HeartbeatThread(emit, lambda: 1, lambda: 0.0, 0.05, rank=worker.rank, group="g", node="n", node_id="nn")
    worker.barrier()
    thread.close()


def test_a_heartbeat_reports_a_wait_for_other_ranks(tmp_path: Path) -> None:
    run_ranks(2, wait_at_a_barrier, tmp_path / "seen")
    assert (tmp_path / "seen").exists()
