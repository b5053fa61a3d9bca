"""What Ray's AutoscalingCoordinator believes of the cluster, kept up to date.

Runs of MIN:MAX workers are given their places by this actor. By itself it looks at the nodes every 20 s, and believes
in a driver that was killed for 180 s: a run would wait that long.
"""

import time
from contextlib import suppress
from typing import Any

NAME = "AutoscalingCoordinator"
POLL_SECONDS = 0.5


class AutoscalingCoordinatorSync:
    """The connected cluster's; until a run of MIN:MAX workers has made the actor, nothing happens.

    Args:
        left_over: Ray's ids of earlier Ray Train runs, which are over.
    """

    def __init__(self, left_over: set[str]) -> None:
        self._left_over = left_over
        self._nodes: frozenset[str] = frozenset()
        self._looked = float("-inf")
        self._coordinator: Any = None

    def poll(self) -> None:
        """Where nodes have come or gone, let the actor look too; take back what runs that are over asked for."""
        if time.monotonic() - self._looked >= POLL_SECONDS:
            self._looked = time.monotonic()
            with suppress(Exception):  # the actor looks by itself, later
                self._look()

    def _look(self) -> None:
        import ray

        nodes = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        if nodes == self._nodes and not self._left_over:
            return
        if self._coordinator is None:
            self._coordinator = ray.get_actor(NAME, namespace=NAME)
        while self._left_over:
            self._coordinator.cancel_request.remote(f"train-{self._left_over.pop()}")
        self._coordinator.get_reserved_resources.remote("", recompute=True)
        self._nodes = nodes
