"""The watch over the driver's own node, which may be about to be taken away.

Of draining nodes Ray Train looks at those with ranks alone. A cluster's head has none: where Kubernetes evicts it, the
driver must interrupt the run, or what was trained since the newest checkpoint is lost with it.
"""

import time
from contextlib import suppress

POLL_SECONDS = 1.0
DRAINING = "interrupted, since the driver's node is about to be taken away"


class DriverNode:
    """The node of the connected cluster that this process runs on."""

    def __init__(self) -> None:
        self._polled = float("-inf")

    def poll(self) -> str:
        """Return why the run must end; empty while the node stays. Asks Ray at most every `POLL_SECONDS`."""
        if time.monotonic() - self._polled < POLL_SECONDS:
            return ""
        self._polled = time.monotonic()
        import ray

        with suppress(Exception):  # Ray does not answer: the next poll asks again
            if ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes():
                return DRAINING
        return ""
