"""What the driver makes of its news: whose errors count, and when an interrupted run has left."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from raydali.launch.driver.event_router import EventRouter
from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.restart_policy import RestartPolicy
from raydali.run.folder import RunFolder
from tests.support.ranks import folder_of


class News:
    """An Ear over a mailbox that the test fills."""

    def __init__(self, folder: RunFolder, max_failures: int = -1) -> None:
        self.messages: list[dict[str, Any]] = []
        self.board: dict[str, Any] = {}
        self.folder = folder
        self.ear = EventRouter(
            self,  # type: ignore[arg-type]  # the mailbox
            folder,
            MagicMock(),
            MagicMock(),
            MagicMock(),
            MagicMock(),
            MagicMock(),
            RestartPolicy(max_failures, 0, lambda left_out: False),
            HangWatch(0),
            lambda killed, places, error, hung: error,
        )

    def empty(self) -> list[dict[str, Any]]:
        messages, self.messages = self.messages, []
        return messages

    def write(self, **facts: Any) -> None:
        self.board |= facts

    def hear(self, kind: str, **facts: Any) -> None:
        self.messages.append({"kind": kind, **facts})
        self.ear.dispatch()

    def event(self, event: str, **facts: Any) -> None:
        self.hear("event", event=event, **facts)

    def error(self, text: str, group: str, *, final: bool = False) -> None:
        self.hear("error", rank=0, step=7, error=text, traceback="", usage=False, final=final, group=group)

    def failure(self, killed: tuple[int, ...] = (), error: str = "it is gone") -> None:
        self.event("failure", ranks=[0, 1], killed=list(killed), error=error)


@pytest.fixture
def news(tmp_path: Path) -> News:
    return News(folder_of(tmp_path))


def test_a_group_that_trains_again_has_not_left(news: News) -> None:
    news.event("start", step=0)
    news.event("left", notice="preemption", step=9)
    assert news.ear.left
    news.event("preemption", ranks=[0])
    news.event("resume", step=9)
    assert (news.ear.left, news.ear.training) == (False, True)


def test_errors_are_of_the_group_that_ended_last(news: News) -> None:
    news.error("OSError: a hiccup", "first")
    news.failure()
    news.event("resume", step=5)
    news.error("RuntimeError: connection closed", "second")
    news.failure(killed=(1,), error="killed by 9")
    assert news.ear.errors == [] and news.ear.failure == "killed by 9"
    news.error("ValueError: no", "third")
    news.error("RuntimeError: connection closed", "third")
    assert [error["error"] for error in news.ear.errors] == ["ValueError: no", "RuntimeError: connection closed"]


def test_a_late_error_of_an_old_group_is_not_the_next_groups(news: News) -> None:
    for group in ("first", "second"):
        assert news.ear.why is None
        news.error("ValueError: no", group)
        news.failure()
        news.error("RuntimeError: connection closed", group)
    assert news.ear.why is not None and "2 times in a row" in news.ear.why
    assert [error["error"] for error in news.ear.errors] == ["ValueError: no"]


def test_workers_that_die_at_start_are_not_restarted_forever(tmp_path: Path) -> None:
    news = News(folder_of(tmp_path), max_failures=2)
    for _ in range(3):
        assert news.ear.why is None
        news.event("failure", ranks=[], killed=[], error="the actor died", starting=True)
    assert news.ear.why is not None and "--max-failures is 2" in news.ear.why


def test_restarts_are_permitted_only_while_the_run_continues(news: News) -> None:
    news.event("failure", ranks=[0], killed=[0], error="it died", end=1)
    assert news.board["permitted"] == 1
    news.event("failure", ranks=[0], killed=[0], error="it died", end=2)
    assert news.board["permitted"] == 1
    assert news.folder.rows("events.jsonl")[-1]["pause"] == 15
    news.event("resize", workers=2, end=3)
    assert news.board["permitted"] == 3
    news.error("ValueError: no", "third", final=True)
    news.event("failure", ranks=[0], killed=[], error="ValueError: no", end=4)
    assert news.board["permitted"] == 3


def test_a_failure_says_how_far_the_run_was(news: News) -> None:
    news.hear("progress", step=40)
    news.failure()
    assert news.folder.rows("events.jsonl")[-1]["step"] == 40
