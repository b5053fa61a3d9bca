"""How the driver hears: workers and the controller post to a named actor, the driver empties it.

The other way round goes one word only: that the driver wants the run to stop.
"""

import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Message = dict[str, Any]
_ASKED_EVERY = 0.5


@ray.remote(num_cpus=0)
class _Box:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._stop = False

    def post(self, message: Message) -> None:
        self._messages.append(message)

    def empty(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages

    def stop(self) -> None:
        self._stop = True

    def stopping(self) -> bool:
        return self._stop


class Mailbox:
    """Messages from anywhere in the cluster to the driver, in order of arrival; can be passed to any process."""

    def __init__(self, name: str) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._box = _Box.options(name=name, scheduling_strategy=here).remote()  # type: ignore[attr-defined]
        self._reply: Any = None
        self._asked = float("-inf")

    def post(self, **message: Any) -> None:
        """Send without waiting; `kind` says what it is about."""
        self._box.post.remote(message)

    def post_and_wait(self, **message: Any) -> None:
        """Send and wait until it is there: for last words."""
        ray.get(self._box.post.remote(message), timeout=10)

    def empty(self) -> list[Message]:
        """What came since the last call."""
        messages: list[Message] = ray.get(self._box.empty.remote())
        return messages

    def stop(self) -> None:
        """Ask the workers to stop."""
        self._box.stop.remote()

    def stopping(self) -> bool:
        """Whether they have been asked, as of about a second ago; never waits."""
        if self._reply is not None and ray.wait([self._reply], timeout=0)[0]:
            reply, self._reply = self._reply, None
            if ray.get(reply):
                return True
        if self._reply is None and time.monotonic() - self._asked >= _ASKED_EVERY:
            self._reply, self._asked = self._box.stopping.remote(), time.monotonic()
        return False
