"""What the driver does with messages: which errors count, when workers have left, and when the next group may start."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from raydali.launch.driver import group_size, restart_policy
from raydali.launch.driver.event_router import EventRouter
from raydali.launch.driver.group_size import GroupSize
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.placement import Placement
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.launch.driver.run_recorder import RunRecorder
from raydali.launch.driver.worker_groups import WorkerGroups
from raydali.launch.trainer import GroupEnd, fit
from raydali.report.console import Console
from raydali.report.html.live import LiveReport
from raydali.run.events import Failure, Left, Preemption, Resumed, Started
from raydali.run.folder import RunFolder
from raydali.run.messages import Heartbeat, Message, Progress, WorkerError
from tests.support.messages import mentions
from tests.support.ranks import folder_of

ARRIVED = 1.7e9
"""The time at which messages arrive, in seconds since 1970."""


class Driver:
    """A router over a channel that the test fills; a group ends with what the test puts into `end`."""

    def __init__(self, folder: RunFolder, max_failures: int = -1, workers: tuple[int, int] = (2, 2)) -> None:
        self.messages: list[Message] = []
        self.starts: list[int] = []
        self.notices: list[str | None] = []
        self.ends: list[GroupEnd] = []
        self.resources = {"a": ({"CPU": 4.0}, {"CPU": 4.0})}
        self.folder = folder
        channel: Any = self
        policy = RestartPolicy(max_failures, 0, lambda left_out: False)
        size = GroupSize(Placement(*workers, 1, False, workers[1]), lambda: self.resources)
        self.groups = WorkerGroups(
            channel, MagicMock(), {}, size, policy, MagicMock(), lambda killed, places, error, hung: error
        )
        recorder = RunRecorder(folder, LiveReport(folder, print), MagicMock(), print, print)
        self.router = EventRouter(channel, self.groups, HangWatch(0), recorder, Console())

    def empty(self) -> list[tuple[float, Message]]:
        messages, self.messages = self.messages, []
        return [(ARRIVED, message) for message in messages]

    def call(self, function: Any, _training: Any, _task: Any, workers: int, *_: Any) -> "Driver":
        assert function is fit
        self.starts.append(workers)
        return self

    def has_returned(self, seconds: float = 0.0) -> bool:
        return bool(self.ends)

    def result(self) -> GroupEnd:
        return self.ends.pop()

    def notify(self, notice: str | None) -> None:
        self.notices.append(notice)

    def receive(self, *messages: Message) -> None:
        self.messages += messages
        self.router.dispatch()

    def error(self, text: str, group: str, *, final: bool = False) -> None:
        self.receive(WorkerError(rank=0, group=group, step=7, node_id="", error=text, final=final))

    def end(self, end: GroupEnd) -> None:
        self.ends.append(end)
        self.receive()

    def failure(self, killed: tuple[int, ...] = (), error: str = "it is gone") -> None:
        self.end(Failure(ranks=[0, 1], killed=killed, error=error))


def started(step: int, kind: type[Started] = Resumed) -> Started:
    return kind(step=step, steps=400, world_size=2, device="cpu")


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(group_size, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(restart_policy, "PAUSES", (0.0,))
    driver = Driver(folder_of(tmp_path))
    driver.receive()
    return driver


def test_events_have_the_time_of_their_arrival(driver: Driver) -> None:
    driver.receive(started(0, Started), started(5))
    assert [row["time"] for row in driver.folder.rows("events.jsonl")] == [ARRIVED] * 2


def test_a_group_that_trains_again_has_not_left(driver: Driver) -> None:
    driver.receive(started(0, Started))
    driver.receive(Left(notice="preemption", step=9))
    assert driver.groups.has_left
    driver.end(Preemption(ranks=[0], error="left"))
    driver.receive(started(9))
    assert (driver.groups.has_left, driver.groups.training) == (False, True)


def test_errors_are_of_the_group_that_ended_last(driver: Driver) -> None:
    driver.error("OSError: a hiccup", "first")
    driver.failure()
    driver.receive(started(5))
    driver.error("RuntimeError: connection closed", "second")
    driver.failure(killed=(1,), error="killed by 9")
    assert driver.groups.errors == [] and driver.groups.failure == "killed by 9"
    driver.error("ValueError: no", "third")
    driver.error("RuntimeError: connection closed", "third")
    assert [error.error for error in driver.groups.errors] == ["ValueError: no", "RuntimeError: connection closed"]


def test_the_error_that_ends_a_run_stays_when_others_are_killed(driver: Driver) -> None:
    driver.receive(started(5))
    driver.error("DataError: too many samples are broken", "first", final=True)
    driver.failure(killed=(1,), error="killed by 9")
    assert [error.error for error in driver.groups.errors] == ["DataError: too many samples are broken"]


def test_a_late_error_of_an_old_group_is_not_the_next_groups(driver: Driver) -> None:
    for group in ("first", "second"):
        assert driver.groups.stop_reason is None
        driver.error("ValueError: no", group)
        driver.failure()
        driver.error("RuntimeError: connection closed", group)
    assert driver.groups.stop_reason is not None and mentions(driver.groups.stop_reason, "2 times")
    assert [error.error for error in driver.groups.errors] == ["ValueError: no"]


def test_workers_that_die_at_start_are_not_restarted_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "PAUSES", (0.0,))
    driver = Driver(folder_of(tmp_path), max_failures=2)
    for _ in range(3):
        driver.receive()
        assert driver.groups.stop_reason is None
        driver.end(Failure(ranks=[], killed=[], error="the actor died", starting=True))
    assert driver.groups.stop_reason is not None and "--max-failures is 2" in driver.groups.stop_reason


def test_nodes_that_were_left_out_are_used_again(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    """The others do not suffice any more, while the workers wait for their places."""
    driver.groups._policy.left_out = ("a",)
    driver.groups.training = True
    driver.receive()
    assert [*driver.groups._policy.left_out] == ["a"]
    driver.groups.training, driver.groups._look_at = False, 0.0
    driver.receive()
    assert not [*driver.groups._policy.left_out]
    assert mentions(capsys.readouterr().out, "left out used again")


def test_groups_follow_each_other_while_the_run_continues(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver.starts == [2]
    driver.failure(killed=(0,))
    assert driver.starts == [2, 2]
    driver.end("not placed")
    assert driver.starts == [2, 2, 2] and len(driver.folder.rows("events.jsonl")) == 1
    monkeypatch.setattr(restart_policy, "PAUSES", (15.0,))
    driver.failure(killed=(0,))
    assert len(driver.starts) == 3 and driver.folder.rows("events.jsonl")[-1]["pause"] == 15
    driver.error("ValueError: no", "third", final=True)
    driver.groups._start_at = 0.0
    driver.receive()
    assert len(driver.starts) == 3


def test_a_group_that_has_left_is_followed_by_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_size, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(group_size, "GROW_SECONDS", 0.0)
    driver = Driver(folder_of(tmp_path), workers=(1, 3))
    driver.resources["a"] = {"CPU": 1.0}, {"CPU": 1.0}
    driver.receive()
    driver.resources["a"] = {"CPU": 3.0}, {"CPU": 2.0}
    driver.receive()
    assert driver.starts == [1] and driver.notices == []
    driver.receive(started(0, Started))
    assert driver.notices == ["resize"]
    driver.resources["a"] = {"CPU": 3.0}, {"CPU": 3.0}
    driver.end("left")
    assert driver.starts == [1, 3] and driver.notices == ["resize", None]
    assert [(row["event"], row.get("workers")) for row in driver.folder.rows("events.jsonl")][1:] == [("resize", 3)]


def test_after_a_stop_and_at_the_end_no_group_starts(driver: Driver) -> None:
    driver.groups.stop()
    driver.end("left")
    assert (driver.starts, driver.notices) == ([2], ["stop"])
    driver.groups._stops, driver.groups._running = False, None
    driver.receive()
    driver.end("finished")
    assert driver.groups.finished and driver.starts == [2, 2]


def test_a_rank_that_died_is_placed_by_its_heartbeats(driver: Driver) -> None:
    beat: dict[str, Any] = {"group": "g", "started": 1, "count": 0, "progress": 0.0, "stack": None, "waits": False}
    driver.receive(*(Heartbeat(rank=rank, node="n", node_id="nn", pid=70 + rank, **beat) for rank in (0, 1)))
    driver.failure(killed=(1,))
    assert driver.folder.rows("events.jsonl")[-1]["nodes"] == ["nn"]


def test_the_row_of_a_failure_has_the_last_completed_step(driver: Driver) -> None:
    driver.receive(Progress(step=40, steps=400, epoch=0, epochs=1, samples_consumed=40))
    driver.failure()
    assert driver.folder.rows("events.jsonl")[-1]["step"] == 40
