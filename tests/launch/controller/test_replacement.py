"""Ranks survive some failures of others, which the controller sees in the status of all workers."""

import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from raydali.errors import UsageError
from raydali.launch.channel import Board
from raydali.launch.controller import replacement
from raydali.launch.controller.replacement import ERROR_SECONDS, Replacements
from raydali.run.events import Replaced
from raydali.run.messages import Message, Note
from raydali.train.membership import RankLostError
from raydali.train.roster import announce_loss, note_rehearsal, ranks_of
from tests.support.messages import mentions


@dataclass
class Channel:
    """A channel on whose board a group trains, with what was posted."""

    posted: list[Message] = field(default_factory=list)
    training: bool = True

    def board(self) -> Board:
        return Board(training=self.training)

    def post(self, message: Message) -> None:
        self.posted.append(message)


class Group:
    """Workers on a node."""

    start_timeout = 1800.0

    def get_workers(self) -> list[Any]:
        return [SimpleNamespace(metadata=SimpleNamespace(node_id="a", pid=number), actor=number) for number in range(4)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(replacement, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the workers that are killed."""
    found: list[int] = []
    monkeypatch.setattr(ray, "kill", found.append)
    return found


def replacements(channel: Any, monkeypatch: pytest.MonkeyPatch) -> Replacements:
    monkeypatch.setenv(replacement.STORE, "")  # so that it is taken back
    found = Replacements(channel, 3)
    for _ in range(3):
        note_rehearsal(found._store)
    return found


def status(workers: int = 3, /, **errors: Exception) -> WorkerGroupPollStatus:
    """Return the status of some workers, some of which have failed: `_1=error`."""
    failed = {int(name[1:]): UserExceptionWithTraceback(error, str(error)) for name, error in errors.items()}
    return WorkerGroupPollStatus(
        {number: WorkerStatus(running=number not in failed, error=failed.get(number)) for number in range(workers)}
    )


DEAD = WorkerHealthCheckFailedError("it died", failure=RayActorError())


def with_dead(number: int, workers: int = 4) -> WorkerGroupPollStatus:
    """Return the status of some workers, of which one has died."""
    alive = status(workers).worker_statuses
    return WorkerGroupPollStatus(alive | {number: WorkerStatus(running=False, error=DEAD)})


def test_a_rank_that_fails_alone_is_lost(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    channel, group, gpu_error = Channel(), Group(), RuntimeError("CUDA error: unspecified launch failure")
    found = replacements(channel, monkeypatch)
    for passed in (0.0, ERROR_SECONDS / 2):
        clock[0] += passed
        assert not found.survived(group, status(_1=gpu_error), ()).errors  # type: ignore[arg-type]
        assert not channel.posted, "others may fail, too"
    clock[0] += ERROR_SECONDS
    for _ in range(2):
        assert not found.survived(group, status(_1=gpu_error), ()).errors  # type: ignore[arg-type]
    (loss,) = channel.posted
    assert isinstance(loss, Replaced) and (loss.ranks, loss.remaining, loss.error) == ([1], 2, str(gpu_error))
    assert [*ranks_of(found._store, 3)[0].values()] == [0, 2]


@pytest.mark.parametrize(
    "errors",
    [
        {"_0": ValueError("a"), "_1": ValueError("a"), "_2": ValueError("a")},
        {"_1": UsageError("a")},
        {"_1": pickle.loads(pickle.dumps(RankLostError()))},  # as Ray sends it
        {"_1": ValueError("a"), "_2": UsageError("a")},
    ],
    ids=["all", "of raydali", "not replaced", "of one and of raydali"],
)
def test_all_restart_after_other_errors(
    errors: dict[str, Exception], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, failed = Channel(), status(**errors)
    found = replacements(channel, monkeypatch)
    for _ in range(2):
        assert found.survived(Group(), failed, ()).errors == failed.errors  # type: ignore[arg-type]
        clock[0] += ERROR_SECONDS
    assert not channel.posted


def test_all_restart_after_an_error_before_the_first_step(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    channel, failed = Channel(training=False), status(_1=RuntimeError("CUDA out of memory"))
    found = replacements(channel, monkeypatch)
    for _ in range(2):
        assert found.survived(Group(), failed, ()).errors == failed.errors  # type: ignore[arg-type]
        clock[0] += ERROR_SECONDS
    assert not channel.posted


def test_a_replacement_that_fails_before_it_joins_is_not_replaced(
    clock: list[float], killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, failed = Channel(), status(_1=RuntimeError("no kernel image is available"))
    found = replacements(channel, monkeypatch)
    announce_loss(found._store, "1")
    found._names[1] = "1-new"
    for _ in range(2):
        assert found.survived(Group(), failed, ()).errors == failed.errors  # type: ignore[arg-type]
        clock[0] += ERROR_SECONDS
    assert not channel.posted and not killed


def test_a_spare_that_fails_disturbs_nobody_and_is_replaced_only_once(
    clock: list[float], killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, started = Channel(), list[list[int]]()
    found = replacements(channel, monkeypatch)

    def replace(_: Any, numbers: Any) -> None:
        started.append([*numbers])
        found._lost -= {*numbers}
        found._names[3] = f"3-{len(started)}"
        found.starting = ()

    monkeypatch.setattr(found, "_replace", replace)
    monkeypatch.setattr(replacement, "Thread", at_once)
    for _ in range(2):
        for _ in range(2):
            failed = status(4, _3=RuntimeError("CUDA error: device requires reset"))
            assert not found.survived(Group(), failed, ()).errors  # type: ignore[arg-type]
            clock[0] += ERROR_SECONDS
        assert not found.survived(Group(), with_dead(3), ()).errors  # type: ignore[arg-type]
    assert killed == [3, 3] and started == [[3]]
    assert [(loss.ranks, loss.spares) for loss in channel.posted if isinstance(loss, Replaced)] == [([], 1), ([], 1)]


def test_who_is_not_ready_to_replace_a_rank_in_time_is_ended(
    clock: list[float], killed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle spare is not, before a rank is lost."""
    channel = Channel()
    found = replacements(channel, monkeypatch)
    monkeypatch.setattr(replacement, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    clock[0] += 10 * Group.start_timeout
    found.survived(Group(), status(4), [2])  # type: ignore[arg-type]
    assert not killed
    found.survived(Group(), with_dead(1), ())  # type: ignore[arg-type]
    found._names[1], found._lost, found.starting = "1-new", set(), ()  # it runs now, as the spare does
    clock[0] += Group.start_timeout - 1
    found.survived(Group(), status(4), ())  # type: ignore[arg-type]
    assert not killed
    clock[0] += 1
    for _ in range(2):
        found.survived(Group(), status(4), ())  # type: ignore[arg-type]
    assert sorted(killed) == [1, 3]
    note, _ = [each.text for each in channel.posted if isinstance(each, Note)]
    assert mentions(note, "1800 s --start-timeout")


def at_once(*, target: Any, args: Any, **_: Any) -> Any:
    return SimpleNamespace(start=lambda: target(*args))
