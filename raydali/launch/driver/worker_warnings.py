"""Warnings that code in workers gives by `warnings` and `logging`: shown once for all ranks that gave them.

Otherwise they would only be in the workers' logs, which nobody reads. The output of C++ stays there.
"""

import time
from collections.abc import Callable

from raydali.run.messages import MORE_WARNINGS, ForwardedWarning
from raydali.text import numbered

GATHER_SECONDS = 1.0
"""Delay before a warning is shown, to collect all ranks that gave it."""
MAX_LINES = 100
"""Limit of lines per run."""


class WorkerWarnings:
    """Merges equal warnings into one line, which is shown once in a run.

    Args:
        now: a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._known: set[str] = set()
        self._gathering: dict[str, tuple[float, set[int]]] = {}

    def add(self, warning: ForwardedWarning) -> None:
        """Take a warning of one rank."""
        text = warning.text
        if text not in self._known and len(self._known) >= MAX_LINES:
            text = MORE_WARNINGS
        if text not in self._known:
            self._known.add(text)
            self._gathering[text] = self._now(), set()
        if text in self._gathering:
            self._gathering[text][1].add(warning.rank)

    def lines(self, *, at_end: bool = False) -> list[str]:
        """Return the lines that are due; with `at_end` all that are left."""
        due = [text for text, (since, _) in self._gathering.items() if at_end or self._now() - since >= GATHER_SECONDS]
        return [f"{numbered('rank', sorted(self._gathering.pop(text)[1]))}: {text}" for text in due]
