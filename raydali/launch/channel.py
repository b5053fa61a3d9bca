"""How driver, controller and workers speak: all post messages to a named actor, which the driver empties.

The other way round there is a board, which the driver writes and anybody reads: what the workers are asked to do, and
which start of a worker group is permitted.
"""

import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Message = dict[str, Any]
WorkerAddress = tuple[str, int]
"""The node's id and the process's id of a worker."""
Notice = Literal["preemption", "stop", "resize"]
_POLL_SECONDS = 0.5


class Interrupted(Exception):
    """Training left on notice, behind a checkpoint of all that it did."""

    def __init__(self, notice: Notice) -> None:
        super().__init__(notice)
        self.notice = notice


@dataclass(frozen=True, kw_only=True)
class Board:
    """The facts that the driver, and for a resize the controller, has written.

    Attributes:
        notice: why the workers are to leave behind a checkpoint; None while they are to train.
        permitted: ends of worker groups after which the next group may start.
        left_out: ids of the nodes on which no worker is to start.
        training: whether a worker group is past its first step.
        left: whether its workers have left behind a checkpoint.
    """

    notice: Literal["stop", "resize"] | None = None
    permitted: int = 0
    left_out: tuple[str, ...] = ()
    training: bool = False
    left: bool = False


@ray.remote(num_cpus=0)
class _ChannelActor:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._board = Board()
        self._groups = 0

    def next_group(self) -> int:
        self._groups += 1
        return self._groups

    def post(self, message: Message) -> None:
        self._messages.append(message)

    def empty(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def write(self, facts: dict[str, Any]) -> None:
        self._board = replace(self._board, **facts)

    def ask_to_resize(self, wanted: bool) -> None:
        if self._board.notice != "stop":
            self._board = replace(self._board, notice="resize" if wanted else None)

    def board(self) -> Board:
        return self._board


class DriverChannel:
    """Messages from anywhere in the cluster to the driver, in order of arrival; can be passed to any process."""

    def __init__(self, name: str) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._box = _ChannelActor.options(name=name, scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        self._reply: Any = None
        self._asked = float("-inf")

    def post(self, **message: Any) -> None:
        """Send without waiting; `kind` says what it is about."""
        self._box.post.remote(message)

    def post_and_wait(self, **message: Any) -> None:
        """Send and wait until it is there: for last words."""
        ray.get(self._box.post.remote(message), timeout=10)

    def next_group(self) -> int:
        """The number of a worker group that begins, from 1; a node that is cut off from the driver gets none."""
        number: int = ray.get(self._box.next_group.remote())
        return number

    def empty(self) -> list[Message]:
        """What came since the last call."""
        messages: list[Message] = ray.get(self._box.empty.remote())
        return messages

    def write(self, **facts: Any) -> None:
        """Change these fields of the board."""
        self._box.write.remote(facts)

    def stop(self) -> None:
        """Ask the workers to stop."""
        self.write(notice="stop")

    def ask_to_resize(self, wanted: bool) -> None:
        """Ask the workers to leave for another number of them, or no longer; a stop is not taken back."""
        self._box.ask_to_resize.remote(wanted)

    def board(self) -> Board:
        """The board as it is now."""
        board: Board = ray.get(self._box.board.remote())
        return board

    def notice(self) -> Literal["stop", "resize"] | None:
        """The board's notice, as of about a second ago; never waits."""
        if self._reply is not None and ray.wait([self._reply], timeout=0)[0]:
            reply, self._reply = self._reply, None
            board: Board = ray.get(reply)
            if board.notice is not None:
                return board.notice
        if self._reply is None and time.monotonic() - self._asked >= _POLL_SECONDS:
            self._reply, self._asked = self._box.board.remote(), time.monotonic()
        return None
