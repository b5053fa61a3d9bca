"""Whether a run goes on after a failure: what will recur ends it by name, what may not is tried again."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

SAME_ERROR, SAME_DEATH = 2, 3
"""How often in a row the same error, or a process killed from outside, at the same step is no accident."""
_VARYING = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


class Failures:
    """Counts the failures of a run's worker groups, preemptions not among them.

    Args:
        limit: how many in a row may happen while the run gets no further; -1 for any number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._start = 0
        self._without_progress = 0
        self._last: tuple[str, int] | None = None
        self._same = 0

    def begun(self, step: int) -> None:
        """A worker group has done its first step behind `step`, the newest checkpoint's."""
        if step > self._start:
            self._start, self._without_progress = step, 0

    def failed(self, event: Mapping[str, Any], errors: Sequence[Mapping[str, Any]], step: int) -> str | None:
        """Count a failure.

        Args:
            event: the watcher's.
            errors: what workers said of it themselves, the first first.
            step: the last one that is known to be done.

        Returns:
            Why the run must end; None where it is to go on.
        """
        killed = bool(event["killed"]) or event.get("starting", False)
        text = event["error"] if killed or not errors else errors[0]["error"]
        if not killed and errors:
            step = errors[0]["step"]
        same = _VARYING.sub("#", text), step
        self._same = self._same + 1 if same == self._last else 1
        self._last = same
        self._without_progress += 1
        if self._same >= (SAME_DEATH if killed else SAME_ERROR):
            return f"the same failure came {self._same} times in a row behind step {step}, so it would come again"
        if 0 <= self._limit < self._without_progress:
            if self._limit == 0:
                return "--max-failures is 0"
            return (
                f"{self._without_progress} failures in a row, and no checkpoint beyond step {self._start}: "
                f"--max-failures is {self._limit}"
            )
        return None
