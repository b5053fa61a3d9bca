"""What code in workers warns of, by `warnings` and by `logging`: said by the driver once, with the ranks.

Such warnings otherwise end in a log of the worker's, where nobody looks. What C++ prints stays there.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

MAX_TEXTS = 20
"""Of a worker: texts that tell the step or the file may have no end."""
GATHER_SECONDS = 1.0
"""Between hearing a text from the first rank and saying it, with all the ranks that it came from by then."""
MAX_LINES, MAX_RANKS = 100, 8
"""That the driver says of a run, and that a line names."""
MORE = "there are more warnings, which Ray's logs of the workers have"


@contextmanager
def overheard(tell: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile, hand on each warning and error that this process's code gives, each text once; the logs get them too.

    Args:
        tell: takes a text, at any time and from any thread.
    """
    handler, shows = _Handler(tell), warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        shows(message, category, filename, lineno, file, line)
        if file is None:
            handler.hand_on(f"{category.__name__}: {message} ({filename}:{lineno})")

    known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    # PyTorch's and others keep what they log to themselves. Ray's speak of what the driver sees for itself.
    apart = [logger for logger in known if not logger.propagate and logger.name.partition(".")[0] != "ray"]
    for logger in (logging.root, *apart):
        logger.addHandler(handler)
    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shows
        for logger in (logging.root, *apart):
            logger.removeHandler(handler)


class _Handler(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._told: set[str] = set()
        self._process = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = f": {type(error).__name__}: {error}" if error is not None else ""
        self.hand_on(f"{record.getMessage()}{why}" + (f" ({record.name})" if record.name != "root" else ""))

    def hand_on(self, text: str) -> None:
        if os.getpid() != self._process:  # a fork, which must not speak on its parent's connections
            return
        if text in self._told or len(self._told) > MAX_TEXTS:
            return
        self._told.add(text)
        with suppress(Exception):  # a warning must not end what it warns of
            self._tell(text if len(self._told) <= MAX_TEXTS else MORE)


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
