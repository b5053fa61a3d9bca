"""Decides how many workers the next group has, and describes what they wait for until they have their places.

A run of MIN:MAX workers uses the resources that other jobs leave free, at a start and every minute.
"""

import os
import time
from collections.abc import Callable, Collection

from raydali.launch.driver.cluster import Cluster
from raydali.launch.driver.placement import Placement
from raydali.launch.trainer import START_TIMEOUT
from raydali.text import plural

SETTLE_SECONDS = 5.0
"""Time for the resources of a dead worker group to become free, before a smaller group is started."""
LOOK_SECONDS = 0.5
GROW_SECONDS = 60.0
"""Interval at which a group that trains looks for resources for more workers."""
PLACEMENT_SECONDS = {False: 60.0, True: 3.0}
"""How long a group waits for its places, if its size is fixed or not: what was free may be taken, or its node dead."""
WORKERS_A_SECOND = 50
"""Number of workers placed per second, which is added to this time."""
MAX_PLACEMENT_SECONDS = 120.0

POLL_SECONDS = 2.0
GRACE_SECONDS = 4.0
"""No report before this: most workers are placed by then."""
ROOM_SECONDS = 30.0
"""The same if there is room for the workers, since Ray Train takes a while to request it."""
CHANGE_SECONDS = 6.0
"""Minimum interval between different reports."""
REPEAT_SECONDS = 60.0
"""Interval between equal reports."""

Clock = Callable[[], float]
"""A monotonic clock."""


class GroupSize:
    """Chooses the number of workers.

    Args:
        asked: the placement.
        look: returns the present state of the cluster.
        now: a monotonic clock.
    """

    def __init__(self, asked: Placement, look: Callable[[], Cluster], now: Clock = time.monotonic) -> None:
        self._asked, self._look, self._now = asked, look, now
        self._looked_at = self._grown_at = float("-inf")
        self._scarce_since: float | None = None
        self._not_placed = 0

    def of_next(self, left_out: Collection[str]) -> int | None:
        """Return the size of a group that may start now, without these nodes; None while there is no room for it."""
        asked, now = self._asked, self._now()
        if not asked.is_elastic:
            return asked.minimum
        if now - self._looked_at < LOOK_SECONDS:
            return None
        self._looked_at = now
        cluster = self._look()
        free = cluster.fitting_now(asked.cpus, asked.gpu, left_out)
        if free >= min(asked.reachable, cluster.fitting(asked.cpus, asked.gpu, left_out)):
            self._scarce_since = None
        elif self._scarce_since is None:
            self._scarce_since = now
        may_settle = self._scarce_since is not None and now - self._scarce_since < SETTLE_SECONDS
        return min(free, asked.reachable) if free >= asked.minimum and not may_settle else None

    def missing(self, workers: int) -> int:
        """Return how many workers a group of this size lacks."""
        return self._asked.reachable - workers

    def of_larger(self, workers: int, left_out: Collection[str]) -> int | None:
        """Return the size to which a group of so many workers can grow, looked for at times; None if it cannot."""
        asked, now = self._asked, self._now()
        if workers >= asked.reachable or now - self._grown_at < GROW_SECONDS:
            return None
        self._grown_at = now
        size = min(asked.reachable, workers + self._look().fitting_now(asked.cpus, asked.gpu, left_out))
        return size if size > workers else None

    def placement_seconds(self, workers: int) -> float:
        """Return how long a group may wait for its places: longer for a large one, and if earlier ones got none."""
        seconds = float(os.environ.get(START_TIMEOUT, PLACEMENT_SECONDS[self._asked.is_elastic]))
        longer = (seconds + workers / WORKERS_A_SECOND) * 2.0**self._not_placed
        return max(seconds, min(longer, MAX_PLACEMENT_SECONDS))

    def started(self) -> None:
        """Note that a group trains."""
        self._not_placed, self._grown_at = 0, self._now()

    def ended(self, *, placed: bool) -> None:
        """Note that a group has ended, or got no places in its time."""
        self._scarce_since = None
        if not placed:
            self._not_placed = min(self._not_placed + 1, 10)


def describe_waiting(cluster: Cluster, asked: Placement, seconds: float = 0.0) -> str:
    """Describe what the workers have waited for during these seconds; empty if everything is available."""
    need, per_worker = asked.minimum, (asked.cpus, asked.gpu)
    have = cluster.fitting_now(*per_worker)
    if have >= need:
        unplaced = f"waiting for Ray to place {plural(need, 'worker')} of {asked}: there is room for {have}"
        return unplaced if seconds >= ROOM_SECONDS else ""
    missing = need - have
    nodes, held = cluster.growth.nodes_for(missing, *per_worker)
    wanted = [plural(number, f"more {group} node") for group, number in nodes.items()]
    if held < missing:  # the rest is there or nowhere
        place = f"{plural(missing - held, 'place')} for workers of {asked}"
        if cluster.fitting(*per_worker) > have:
            unit, index = ("GPUs", 1) if asked.gpu else ("CPUs", 0)
            there = sum(shape[index] for shape in cluster.nodes.values())
            held_by_others = there - sum(shape[index] for shape in cluster.free.values())
            place += f" (other jobs hold {held_by_others:g} of {there:g} {unit})"
        wanted.append(place)
    text = f"waiting for {' and '.join(wanted)}; {have} of {plural(need, 'worker')} would fit now"
    if cluster.starting:
        text += f", {plural(cluster.starting, 'node')} starting"
    return text + "".join(f"; {failure}" for failure in cluster.failures)


class Waiting:
    """Reports what workers wait for until they have their places.

    Args:
        asked: the placement.
        look: returns the present state of the cluster.
        has_places: returns whether the workers have their places.
        print_line: takes a line for the console.
        pause: seconds before the wait begins.
        now: a monotonic clock.

    Attributes:
        is_over: whether the workers are placed.
    """

    def __init__(
        self,
        asked: Placement,
        look: Callable[[], Cluster],
        has_places: Callable[[], bool],
        print_line: Callable[[str], None],
        pause: float = 0.0,
        now: Clock = time.monotonic,
    ) -> None:
        self._asked, self._look, self._has_places, self._print_line = asked, look, has_places, print_line
        self._now, self.is_over = now, False
        self._began = self._polled = now() + pause
        self._reported_at, self._reported = self._began + GRACE_SECONDS - CHANGE_SECONDS, ""

    def poll(self) -> None:
        """Look at the cluster and report, if it is time to."""
        now = self._now()
        if self.is_over or now - self._polled < POLL_SECONDS:
            return
        self._polled = now
        try:
            self.is_over = self._has_places()
            text = "" if self.is_over else describe_waiting(self._look(), self._asked, now - self._began)
        except Exception:  # a missing report must not end the run
            return
        since = now - self._reported_at
        if text and since >= (CHANGE_SECONDS if text != self._reported else REPEAT_SECONDS):
            self._print_line(f"{text} ({now - self._began:.0f} s)")
            self._reported_at, self._reported = now, text
