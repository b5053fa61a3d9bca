"""The channel between the driver and its workers: an actor that collects their messages for the driver.

In the other direction it holds the driver's notice to the workers, and it runs functions for the driver.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raydali.run.events import Notice
from raydali.run.messages import Message

if TYPE_CHECKING:
    from ray import ObjectRef

POST_SECONDS = 10.0
"""How long a process that ends waits for its last message to arrive."""
T = TypeVar("T")
DriverNotice = Literal["stop", "resize"]


class Interrupted(Exception):  # noqa: N818 (no error: how training ends on notice)
    """Training left on notice, after a checkpoint of all completed steps."""

    def __init__(self, notice: Notice) -> None:
        super().__init__(notice)
        self.notice = notice


@ray.remote(num_cpus=0, concurrency_groups={"calls": 2})  # type: ignore[call-overload]
class _ChannelActor:
    def __init__(self) -> None:
        self._messages: list[tuple[float, Message]] = []
        self._notice: DriverNotice | None = None
        self._groups = 0

    def next_group(self) -> int:
        self._groups += 1
        return self._groups

    def post(self, message: Message) -> None:
        self._messages.append((time.time(), message))

    def empty(self) -> list[tuple[float, Message]]:
        messages, self._messages = self._messages, []
        return messages

    def set_notice(self, notice: DriverNotice | None) -> None:
        self._notice = notice

    def notice(self) -> DriverNotice | None:
        return self._notice

    @ray.method(concurrency_group="calls")
    def call(self, function: Callable[..., T], *arguments: object) -> T:
        return function(*arguments)


class Call(Generic[T]):
    """A call of a function in the process of the channel."""

    def __init__(self, reference: "ObjectRef[T]") -> None:
        self._reference = reference

    def has_returned(self, seconds: float = 0.0) -> bool:
        """Wait for at most so long, and return whether the function has returned, or its process has died."""
        return bool(ray.wait([self._reference], timeout=seconds)[0])

    def result(self) -> T:
        """Return its result, or raise a RayError."""
        result: T = ray.get(self._reference)
        return result


class DriverChannel:
    """Messages from anywhere in the cluster to the driver, in order of arrival; can be passed to any process."""

    def __init__(self, name: str) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._actor = _ChannelActor.options(name=name, scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        self._reply: Any = None

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

    def call(self, function: Callable[..., T], *arguments: object) -> "Call[T]":
        """Call a function in the actor's process, which goes on to take messages meanwhile."""
        return Call(self._actor.call.remote(function, *arguments))

    def notify(self, notice: DriverNotice | None) -> None:
        """Ask the workers to save a checkpoint and leave, or no more."""
        self._actor.set_notice.remote(notice)

    def notice(self) -> DriverNotice | None:
        """Return the notice to the workers, as of an earlier call; never waits."""
        if self._reply is None:
            self._reply = self._actor.notice.remote()
        if not ray.wait([self._reply], timeout=0)[0]:
            return None
        reply, self._reply = self._reply, self._actor.notice.remote()
        notice: DriverNotice | None = ray.get(reply)
        return notice
