"""The driver's loop over worker groups, on a channel and a cluster that the test plays."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from unittest.mock import MagicMock

import pytest

from raydali.errors import SupersededError, TrainingError
from raydali.host.interrupts import Interrupt
from raydali.launch.driver import group_size, loop, recorder, restart_policy
from raydali.launch.driver.cluster import Cluster
from raydali.launch.driver.loop import Driver
from raydali.launch.driver.placement import Placement
from raydali.launch.driver.ray_cluster import ConnectedRay
from raydali.launch.driver.recorder import RunRecorder
from raydali.launch.trainer import GroupEnd, fit
from raydali.options.every_job import TrainingOptions
from raydali.report.console import Console
from raydali.run.attempt import ATTEMPT, Attempt
from raydali.run.events import Failure, Left, Preemption, Resumed, Started
from raydali.run.folder import EVENTS, REPORT
from raydali.run.ledger import LEDGER
from raydali.run.messages import EndsEarly, Heartbeat, Message, Progress, WorkerError
from tests.support.messages import mentions
from tests.support.ranks import folder_of

ARRIVED = 1.7e9
"""The time at which messages arrive, in seconds since 1970."""
GONE = Failure(ranks=[0, 1], killed=[], error="it is gone")
KILLED = Failure(ranks=[0, 1], killed=[1], error="killed by 9")
Step = Message | list[Message] | GroupEnd | None


class WasInterruptedError(Exception):
    """The driver was interrupted."""


class Play:
    """A driver whose workers do one step after the other: they send messages, or their group ends.

    After the last step, the run is interrupted.
    """

    def __init__(
        self,
        path: Path,
        max_failures: int = -1,
        workers: tuple[int, int] = (2, 2),
        *,
        own: bool = True,
        shard: int | Literal["all"] | None = None,
    ) -> None:
        self.folder = Attempt().fenced(folder_of(path))
        self.nodes = {"a": ((4.0, 0.0), (4.0, 0.0))}
        self.starts: list[int] = []
        self.requests: list[int] = []
        self.notices: list[str | None] = []
        self._messages: list[Message] = []
        self._steps: Iterator[Any] = iter(())
        self._end: Any = None
        self._interrupt = Interrupt()
        options = TrainingOptions(max_failures=max_failures, hang_timeout=0, start_timeout=0, shard=shard)
        task: Any = MagicMock(options=options, folder=self.folder, channel=self)
        self.recorder = records = RunRecorder(task, print, Console())
        placement = Placement(*workers, 1, False, workers[1])
        cluster = ConnectedRay(self.look, own=own)
        self.driver = Driver(task, placement, cluster, records, self._interrupt)

    def look(self) -> Cluster:
        shapes = self.nodes.items()
        return Cluster({node: all_ for node, (all_, _) in shapes}, {node: free for node, (_, free) in shapes})

    def train(self, *steps: Step | Any) -> None:
        self._steps = iter(steps)
        try:
            self.driver.train()
        except KeyboardInterrupt:
            raise WasInterruptedError from None
        finally:
            self.recorder.finish(lambda: False)

    # The channel.

    def call(self, function: Any, _training: Any, _task: Any, workers: int, *_: Any) -> "Play":
        (self.starts if function is fit else self.requests).append(workers)
        return self

    def has_returned(self, _: float = 0.0) -> bool:
        """Do the next step; a function is called, and may change the cluster."""
        step = next(self._steps, self)
        if step is self:
            self._interrupt.request()
        elif callable(step):
            step()
        elif isinstance(step, str | Failure | Preemption):
            self._end = step
            return True
        elif step is not None:
            messages: Any = step
            self._messages += messages if isinstance(messages, list) else [messages]
        return False

    def result(self) -> GroupEnd:
        end: GroupEnd = self._end
        return end

    def empty(self) -> list[tuple[float, Message]]:
        messages, self._messages = self._messages, []
        return [(ARRIVED, message) for message in messages]

    def notify(self, notice: str | None) -> None:
        self.notices.append(notice)


def started(step: int, kind: type[Started] = Resumed) -> Started:
    return kind(step=step, steps=400, world_size=2, device="cpu")


def error(text: str, group: str, *, final: bool = False) -> WorkerError:
    return WorkerError(rank=0, group=group, step=7, node_id="", error=text, final=final)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_size, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(restart_policy, "PAUSES", (0.0,))
    monkeypatch.setattr(loop, "ray", MagicMock())
    # Without a Ray to ask, they would start one.
    monkeypatch.setattr("raydali.launch.trainer.has_places", lambda: True)
    monkeypatch.setattr("raydali.launch.driver.ray_cluster.ConnectedRay.is_leaving", lambda _: False)
    monkeypatch.setattr(recorder, "RunMetrics", MagicMock())
    monkeypatch.setattr("raydali.launch.driver.worker_group.describe_deaths", lambda killed, places, error, hung: error)


def test_events_have_the_time_of_their_arrival(tmp_path: Path) -> None:
    play = Play(tmp_path)
    with pytest.raises(WasInterruptedError):
        play.train([started(0, Started), started(5)])
    assert [row["time"] for row in play.folder.rows("events.jsonl")] == [ARRIVED] * 2


def test_groups_follow_each_other_until_the_run_is_finished(tmp_path: Path) -> None:
    play = Play(tmp_path)
    play.train(started(0), KILLED, "not placed", started(3), Preemption(ranks=[0], error="left"), "finished")
    assert play.starts == [2, 2, 2, 2]
    assert [row["event"] for row in play.folder.rows("events.jsonl")] == ["resume", "failure", "resume", "preemption"]


def test_the_driver_knows_why_its_last_group_ended_early(tmp_path: Path) -> None:
    """If workers fail after they have said so, the next ones say it again, or train to the end."""
    for last, why in (([EndsEarly("enough")], "enough"), ([], None)):
        play = Play(tmp_path / str(why))
        play.train(started(3), EndsEarly("enough"), KILLED, started(5), *last, "finished")
        assert play.driver.early_end == why


def test_a_storage_that_does_not_answer_holds_up_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What happens meanwhile is written in order once it answers; a driver that must leave does not wait."""
    play = Play(tmp_path)
    pipe, aside = Path(play.folder.path(ATTEMPT)), tmp_path / "aside"
    os.mkfifo(pipe)  # each write reads this file first: a pipe that nobody writes to answers never, as a lost server

    def answer() -> None:
        play.recorder.finish(lambda: True)
        assert mentions(capsys.readouterr().out, f"{play.folder} {EVENTS} {REPORT} {LEDGER}")
        assert play.starts == [2, 2, 2] and not play.folder.exists(EVENTS)
        pipe.rename(aside)
        aside.open("wb").close()

    play.train([started(0, Started)], KILLED, started(3), KILLED, started(5), answer, "finished")
    kinds = [row["event"] for row in play.folder.rows("events.jsonl")]
    assert kinds == ["start", "failure", "resume", "failure", "resume"]
    assert len(play.folder.read_json(LEDGER)["groups"]) == 3


@pytest.mark.parametrize(("shard", "over"), [("all", [4, 2]), (2, [2, 2]), (None, [1, 1])])
def test_the_ledger_knows_over_how_many_workers_a_model_was_sharded(
    tmp_path: Path, shard: Any, over: list[int]
) -> None:
    play = Play(tmp_path, workers=(2, 4), shard=shard)
    play.train(
        started(0, Started), lambda: play.nodes.update(a=((2.0, 0.0), (2.0, 0.0))), KILLED, started(3), "finished"
    )
    assert play.starts == [4, 2]
    assert [group["sharded_over"] for group in play.folder.read_json(LEDGER)["groups"]] == over


def test_a_driver_ends_once_another_one_has_taken_over(tmp_path: Path) -> None:
    play = Play(tmp_path)
    Attempt().take(play.folder)
    with pytest.raises(SupersededError):
        play.train(started(0, Started), *[None] * 1000)


def test_after_a_pause_the_next_group_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_policy, "PAUSES", (0.5,))
    play, waits = Play(tmp_path), list[float]()
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setattr("time.monotonic", lambda: sum(waits))
    play.train(KILLED, "finished")
    assert play.folder.rows("events.jsonl")[0]["pause"] == 0.5
    assert play.starts == [2, 2] and sum(waits) >= 0.5


def test_errors_are_of_the_group_that_ended_last(tmp_path: Path) -> None:
    closed = "RuntimeError: connection closed"
    first, second = [error("OSError: a hiccup", "1"), GONE], [started(5), error(closed, "2"), KILLED]
    third = [[error("ValueError: no", "3"), error(closed, "3"), error("late", "2")], GONE]
    play = Play(tmp_path, max_failures=1)
    with pytest.raises(TrainingError, match=r"^rank 0: ValueError: no"):
        play.train(*first, *second, *third)
    assert play.driver.stop_reason is not None and "--max-failures is 1" in play.driver.stop_reason


def test_of_ranks_that_died_the_last_failure_is_told(tmp_path: Path) -> None:
    play = Play(tmp_path, max_failures=0)
    with pytest.raises(TrainingError, match=r"^killed by 9"):
        play.train(started(5), error("RuntimeError: connection closed", "1"), KILLED)


def test_an_error_that_would_recur_ends_the_run_at_once(tmp_path: Path) -> None:
    play = Play(tmp_path)
    with pytest.raises(TrainingError, match="too many samples are broken"):
        play.train(started(5), error("DataError: too many samples are broken", "1", final=True), KILLED)
    assert play.starts == [2] and play.driver.stop_reason == "it would recur"


def test_a_late_error_of_an_old_group_is_not_the_next_groups(tmp_path: Path) -> None:
    play = Play(tmp_path)
    groups = [step for group in "12" for step in (error("ValueError: no", group), GONE)]
    with pytest.raises(TrainingError, match="ValueError: no"):
        play.train(*groups[:2], error("RuntimeError: connection closed", "1"), *groups[2:])
    assert play.driver.stop_reason is not None and mentions(play.driver.stop_reason, "2 times")


def test_workers_that_die_at_start_are_not_restarted_forever(tmp_path: Path) -> None:
    play = Play(tmp_path, max_failures=2)
    with pytest.raises(TrainingError, match=r"the actor died .*--max-failures is 2"):
        play.train(*[Failure(ranks=[], killed=[], error="the actor died", starting=True)] * 3)
    assert play.starts == [2, 2, 2]


def test_an_interrupted_run_waits_until_workers_that_train_have_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play = Play(tmp_path)
    steps = iter([None, Left(notice="stop", step=9)])
    with pytest.raises(WasInterruptedError):
        play.train(started(0), play._interrupt.request, *steps)
    assert play.notices == ["stop"] and play.folder.rows("events.jsonl")[-1]["event"] == "left"
    assert "saving a checkpoint" in capsys.readouterr().out


def test_an_interrupted_run_does_not_wait_for_workers_that_do_not_train(tmp_path: Path) -> None:
    play = Play(tmp_path)
    with pytest.raises(WasInterruptedError):
        play.train(started(0), Left(notice="preemption", step=9), Preemption(ranks=[0], error="left"))
    assert play.notices == [] and play.starts == [2, 2]


def test_a_group_that_has_left_is_followed_by_a_larger_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_size, "GROW_SECONDS", 0.0)
    play = Play(tmp_path, workers=(1, 3))

    def have(cpus: float, free: float) -> Any:
        return lambda: play.nodes.update(a=((cpus, 0.0), (free, 0.0)))

    have(1, 1)()
    play.train(have(3, 2), None, started(0, Started), have(3, 3), "left", "finished")
    assert play.starts == [1, 3] and play.notices == ["resize", None]
    assert [(row["event"], row.get("workers")) for row in play.folder.rows("events.jsonl")][1:] == [("resize", 3)]


@pytest.mark.parametrize(
    ("own", "workers", "requests"), [(True, (1, 3), []), (False, (2, 2), [2, 0]), (False, (1, 6), [2, 6, 2, 0])]
)
def test_workers_that_no_group_has_are_requested_of_the_autoscaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, workers: tuple[int, int], requests: list[int]
) -> None:
    """A fixed group only in a pause, for which its nodes must stay."""
    monkeypatch.setattr(restart_policy, "PAUSES", (0.1,))
    play = Play(tmp_path, workers=workers, own=own)
    play.train(KILLED, "finished")
    assert play.requests == requests


def test_nodes_that_were_left_out_are_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others do not suffice any more, while the workers wait for their places."""
    monkeypatch.setattr(restart_policy, "LOOK_SECONDS", 0.0)
    play = Play(tmp_path)
    policy = play.driver._policy
    seen: list[tuple[str, ...]] = []

    def leave_out() -> None:
        policy.left_out = ("a",)

    def see() -> None:
        seen.append(policy.left_out)

    play.train(started(0), leave_out, see, GONE, None, see, "finished")
    assert seen == [("a",), ()]
    assert mentions(capsys.readouterr().out, "left out used again")


def test_a_failure_has_the_places_of_its_ranks_and_the_last_completed_step(tmp_path: Path) -> None:
    beat: dict[str, Any] = {"group": "1", "started": 1, "count": 0, "progress": 0.0, "stack": None, "waits": False}
    beats = [Heartbeat(rank=rank, node="n", node_id="nn", pid=70 + rank, **beat) for rank in (0, 1)]
    play = Play(tmp_path)
    play.train([*beats, Progress(step=40, steps=400, epoch=0, epochs=1, samples_consumed=40)], KILLED, "finished")
    row = play.folder.rows("events.jsonl")[-1]
    assert (row["nodes"], row["step"]) == (["nn"], 40)
