"""Refreshes Ray's AutoscalingCoordinator, the actor that allocates runs of MIN:MAX workers.

Its defaults (poll nodes every 20 s, forget killed drivers after 180 s) would delay a resume by that long.
"""

import time
from contextlib import suppress
from typing import Any

NAME = "AutoscalingCoordinator"
POLL_SECONDS = 0.5


class AutoscalingCoordinatorSync:
    """The connected cluster's coordinator; nothing happens before a run of MIN:MAX workers has created it.

    Args:
        stale_run_ids: Ray's ids of earlier Ray Train runs, which have ended.
    """

    def __init__(self, stale_run_ids: set[str]) -> None:
        self._stale_run_ids = stale_run_ids
        self._nodes: frozenset[str] = frozenset()
        self._polled = float("-inf")
        self._coordinator: Any = None

    def poll(self) -> None:
        """Refresh the actor if nodes have come or gone, and cancel the requests of runs that have ended."""
        if time.monotonic() - self._polled >= POLL_SECONDS:
            self._polled = time.monotonic()
            with suppress(Exception):  # the actor polls by itself, later
                self._refresh()

    def _refresh(self) -> None:
        import ray

        nodes = frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
        if nodes == self._nodes and not self._stale_run_ids:
            return
        if self._coordinator is None:
            self._coordinator = ray.get_actor(NAME, namespace=NAME)
        while self._stale_run_ids:
            self._coordinator.cancel_request.remote(f"train-{self._stale_run_ids.pop()}")
        self._coordinator.get_reserved_resources.remote("", recompute=True)
        self._nodes = nodes
