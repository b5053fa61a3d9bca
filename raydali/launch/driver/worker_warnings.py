"""What code in workers warns of, by `warnings` and by `logging`: said by the driver once, with the ranks.

Such warnings otherwise end in a log of the worker's, where nobody looks. What C++ prints stays there.
"""

import time
from collections.abc import Callable
from typing import Any

from raydali.launch.worker.log_forwarding import MORE

GATHER_SECONDS = 1.0
"""Between hearing a text from the first rank and saying it, with all the ranks that it came from by then."""
MAX_LINES, MAX_RANKS = 100, 8
"""That the driver says of a run, and that a line names."""


class WorkerWarnings:
    """The driver's side: a text that several ranks hand on is one line, and comes no more in the same run.

    Args:
        now: a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._known: set[str] = set()
        self._gathering: dict[str, tuple[float, set[int]]] = {}

    def take(self, message: dict[str, Any]) -> None:
        """A worker's, with its `rank` and `text`."""
        text = message["text"]
        if text not in self._known and len(self._known) >= MAX_LINES:
            text = MORE
        if text not in self._known:
            self._known.add(text)
            self._gathering[text] = self._now(), set()
        if text in self._gathering:
            self._gathering[text][1].add(message["rank"])

    def lines(self, *, at_end: bool = False) -> list[str]:
        """What is to be said now; `at_end`: without gathering any longer."""
        due = [text for text, (since, _) in self._gathering.items() if at_end or self._now() - since >= GATHER_SECONDS]
        return [f"{_ranks(self._gathering.pop(text)[1])}: {text}" for text in due]


def _ranks(ranks: set[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:MAX_RANKS]))
    more = f" and {len(ranks) - MAX_RANKS} more" if len(ranks) > MAX_RANKS else ""
    return f"rank{'s' * (len(ranks) > 1)} {shown}{more}"
