"""The channel between driver, controller and workers: an actor that collects their messages for the driver.

In the other direction it holds a board, which the driver writes and every process reads: the requests to the workers,
and which start of a worker group is permitted.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydali.run.events import Notice
from raydali.run.messages import Message

_POLL_SECONDS = 0.5
POST_SECONDS = 10.0
"""How long a process that ends waits for its last message to arrive."""
T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818 (no error: how training ends on notice)
    """Training left on notice, after a checkpoint of all completed steps."""

    def __init__(self, notice: Notice) -> None:
        super().__init__(notice)
        self.notice = notice


@dataclass(frozen=True, kw_only=True)
class Board:
    """The requests that the driver has written, and for a resize the controller.

    Attributes:
        notice: why the workers should save a checkpoint and leave; None while they should train.
        permitted: ends of worker groups after which the next group may start.
        left_out: ids of the nodes on which no worker may start.
        training: whether a worker group is past its first step.
        left: whether its workers have saved a checkpoint and left.
    """

    notice: Literal["stop", "resize"] | None = None
    permitted: int = 0
    left_out: tuple[str, ...] = ()
    training: bool = False
    left: bool = False


@ray.remote(num_cpus=0, concurrency_groups={"calls": 1})  # type: ignore[call-overload]
class _ChannelActor:
    def __init__(self) -> None:
        self._messages: list[tuple[float, Message]] = []
        self._board = Board()
        self._groups = 0

    def next_group(self) -> int:
        self._groups += 1
        return self._groups

    def post(self, message: Message) -> None:
        self._messages.append((time.time(), message))

    def empty(self) -> list[tuple[float, Message]]:
        messages, self._messages = self._messages, []
        return messages

    def write(self, facts: dict[str, Any]) -> None:
        self._board = replace(self._board, **facts)

    def ask_to_resize(self, wanted: bool) -> None:
        if self._board.notice != "stop":
            self._board = replace(self._board, notice="resize" if wanted else None)

    def board(self) -> Board:
        return self._board

    @ray.method(concurrency_group="calls")
    def call(self, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)


class DriverChannel:
    """Messages from anywhere in the cluster to the driver, in order of arrival; can be passed to any process."""

    def __init__(self, name: str) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = _ChannelActor.options(name=name, scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        self._reply: Any = None
        self._asked = float("-inf")

    def post(self, message: Message) -> None:
        """Send a message without waiting."""
        self._actor.post.remote(message)

    def post_and_wait(self, message: Message) -> None:
        """Send and wait until it has arrived, or cannot, for a process that is about to end."""
        ray.wait([self._actor.post.remote(message)], timeout=POST_SECONDS)

    def next_group(self) -> int:
        """Return the number of a worker group that begins, from 1; fails on a node that is cut off from the driver."""
        number: int = ray.get(self._actor.next_group.remote())
        return number

    def empty(self) -> list[tuple[float, Message]]:
        """Return the messages that arrived since the last call, with the time of arrival in seconds since 1970."""
        messages: list[tuple[float, Message]] = ray.get(self._actor.empty.remote())
        return messages

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Return what a function returns in the actor's process, which goes on to take messages meanwhile."""
        result: T = ray.get(self._actor.call.remote(function, *arguments))
        return result

    def write(self, **facts: Any) -> None:
        """Change these fields of the board."""
        self._actor.write.remote(facts)

    def stop(self) -> None:
        """Ask the workers to stop."""
        self.write(notice="stop")

    def ask_to_resize(self, wanted: bool) -> None:
        """Ask the workers to leave for a group of another size, or withdraw that; a stop stays."""
        self._actor.ask_to_resize.remote(wanted)

    def board(self) -> Board:
        """Return the current board."""
        board: Board = ray.get(self._actor.board.remote())
        return board

    def notice(self) -> Literal["stop", "resize"] | None:
        """Return the board's notice, as of about a second ago; never waits."""
        if self._reply is not None and ray.wait([self._reply], timeout=0)[0]:
            reply, self._reply = self._reply, None
            board: Board = ray.get(reply)
            if board.notice is not None:
                return board.notice
        if self._reply is None and time.monotonic() - self._asked >= _POLL_SECONDS:
            self._reply, self._asked = self._actor.board.remote(), time.monotonic()
        return None
