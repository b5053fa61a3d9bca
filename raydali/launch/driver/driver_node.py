"""Watches the driver's own node, which may be about to be taken away.

Ray Train only reacts to draining nodes that have ranks, and a cluster's head has none. When Kubernetes evicts it, the
driver must interrupt the run, or all steps since the newest checkpoint are lost.
"""

import time
from collections.abc import Callable
from contextlib import suppress

POLL_SECONDS = 1.0
DRAINING = "interrupted, since the driver's node is about to be taken away"


class DriverNode:
    """The node of the connected cluster that this process runs on.

    Args:
        interrupt: requests the end of the run, with a reason.
    """

    def __init__(self, interrupt: Callable[[str], None]) -> None:
        self._interrupt = interrupt
        self._polled = float("-inf")

    def poll(self) -> None:
        """Interrupt the run if the node is draining. Asks Ray at most every `POLL_SECONDS`."""
        if time.monotonic() - self._polled < POLL_SECONDS:
            return
        self._polled = time.monotonic()
        import ray

        with suppress(Exception):  # Ray does not answer: the next poll asks again
            if ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes():
                self._interrupt(DRAINING)
