"""What the driver does with messages: which errors count, when workers have left, and when the next group may start."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from raydali.launch.driver.event_router import EventRouter
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.launch.driver.run_recorder import RunRecorder
from raydali.launch.driver.worker_groups import WorkerGroups
from raydali.report.console import Console
from raydali.report.html.live import LiveReport
from raydali.run.events import Failure, Left, Preemption, Resize, Resumed, Started
from raydali.run.folder import RunFolder
from raydali.run.messages import EpochEnded, Message, Progress, WorkerError
from tests.support.messages import mentions
from tests.support.ranks import folder_of
from tests.support.records import epoch_line, rank_record

ARRIVED = 1.7e9
"""The time at which messages arrive, in seconds since 1970."""


class Driver:
    """A router over a channel that the test fills."""

    def __init__(self, folder: RunFolder, max_failures: int = -1) -> None:
        self.messages: list[Message] = []
        self.board: dict[str, Any] = {}
        self.folder = folder
        channel: Any = self
        policy = RestartPolicy(max_failures, 0, lambda left_out: False)
        self.groups = WorkerGroups(channel, policy, MagicMock(), lambda killed, places, error, hung: error)
        recorder = RunRecorder(folder, LiveReport(folder, print), MagicMock(), print, print)
        self.router = EventRouter(channel, self.groups, HangWatch(0), recorder, Console())

    def empty(self) -> list[tuple[float, Message]]:
        messages, self.messages = self.messages, []
        return [(ARRIVED, message) for message in messages]

    def write(self, **facts: Any) -> None:
        self.board |= facts

    def receive(self, *messages: Message) -> None:
        self.messages += messages
        self.router.dispatch()

    def error(self, text: str, group: str, *, final: bool = False) -> None:
        self.receive(WorkerError(rank=0, group=group, step=7, node_id="", error=text, final=final))

    def failure(self, killed: tuple[int, ...] = (), error: str = "it is gone", number: int = 0) -> None:
        self.receive(Failure(ranks=[0, 1], killed=killed, error=error, number=number))


def started(step: int, kind: type[Started] = Resumed) -> Started:
    return kind(step=step, steps=400, world_size=2, device="cpu")


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    return Driver(folder_of(tmp_path))


def test_events_have_the_time_of_their_arrival(driver: Driver) -> None:
    driver.failure()
    driver.receive(started(5))
    assert [row["time"] for row in driver.folder.rows("events.jsonl")] == [ARRIVED] * 2


def test_an_epoch_that_the_next_rank_0_reports_again_is_recorded_once(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a restart, the epoch is another one."""
    for step in (0, 5):
        driver.receive(started(step))
        for epoch in (0, 0, 1):
            driver.receive(EpochEnded(epoch_line([rank_record()], epoch=epoch, step=epoch + 10)))
    lines = [line.split()[:1] for line in capsys.readouterr().out.splitlines() if line[:10].strip().isdigit()]
    assert lines == [["0"], ["1"], ["0"], ["1"]]


def test_a_group_that_trains_again_has_not_left(driver: Driver) -> None:
    driver.receive(started(0, Started))
    driver.receive(Left(notice="preemption", step=9))
    assert driver.groups.has_left
    driver.receive(Preemption(ranks=[0], error="left"))
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


def test_workers_that_die_at_start_are_not_restarted_forever(tmp_path: Path) -> None:
    driver = Driver(folder_of(tmp_path), max_failures=2)
    for _ in range(3):
        assert driver.groups.stop_reason is None
        driver.receive(Failure(ranks=[], killed=[], error="the actor died", starting=True))
    assert driver.groups.stop_reason is not None and "--max-failures is 2" in driver.groups.stop_reason


def test_nodes_that_were_left_out_are_used_again(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    """The others do not suffice any more, while the workers wait for their places."""
    driver.groups._policy.left_out = ("a",)
    driver.groups.training = True
    driver.receive()
    assert "left_out" not in driver.board
    driver.groups.training = False
    driver.receive()
    assert driver.board["left_out"] == () and mentions(capsys.readouterr().out, "left out used again")


def test_restarts_are_permitted_only_while_the_run_continues(driver: Driver) -> None:
    driver.failure(killed=(0,), number=1)
    assert driver.board["permitted"] == 1
    driver.failure(killed=(0,), number=2)
    assert driver.board["permitted"] == 1
    assert driver.folder.rows("events.jsonl")[-1]["pause"] == 15
    driver.receive(Resize(workers=2, number=3))
    assert driver.board["permitted"] == 3
    driver.error("ValueError: no", "third", final=True)
    driver.failure(error="ValueError: no", number=4)
    assert driver.board["permitted"] == 3


def test_the_row_of_a_failure_has_the_last_completed_step(driver: Driver) -> None:
    driver.receive(Progress(step=40, steps=400, epoch=0, epochs=1, samples_consumed=40))
    driver.failure()
    assert driver.folder.rows("events.jsonl")[-1]["step"] == 40
