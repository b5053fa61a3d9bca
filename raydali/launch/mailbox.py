"""How the driver hears: workers and the controller post to a named actor, the driver empties it."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

Message = dict[str, Any]


@ray.remote(num_cpus=0)
class _Box:
    def __init__(self) -> None:
        self._messages: list[Message] = []

    def post(self, message: Message) -> None:
        self._messages.append(message)

    def empty(self) -> list[Message]:
        messages, self._messages = self._messages, []
        return messages


class Mailbox:
    """Messages from anywhere in the cluster to the driver, in order of arrival; can be passed to any process."""

    def __init__(self, name: str) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._box = _Box.options(name=name, scheduling_strategy=here).remote()  # type: ignore[attr-defined]

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
