"""Forwards what code in a worker warns of, by `warnings` and by `logging`, to the driver.

Such warnings otherwise end in a log of the worker's, where nobody looks. What C++ prints stays there.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from raydali.run.messages import MORE_WARNINGS

MAX_TEXTS = 20
"""Of a worker: texts that tell the step or the file may have no end."""


@contextmanager
def forwarded_warnings(emit: Callable[[str], None]) -> Iterator[None]:
    """Meanwhile, hand on each warning and error that this process's code gives, each text once; the logs get them too.

    Args:
        emit: takes a text, at any time and from any thread.
    """
    handler, shows = _Handler(emit), warnings.showwarning

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
    def __init__(self, emit: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._emit = emit
        self._sent: set[str] = set()
        self._process = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        why = f": {type(error).__name__}: {error}" if error is not None else ""
        self.hand_on(f"{record.getMessage()}{why}" + (f" ({record.name})" if record.name != "root" else ""))

    def hand_on(self, text: str) -> None:
        if os.getpid() != self._process:  # a fork, which must not speak on its parent's connections
            return
        if text in self._sent or len(self._sent) > MAX_TEXTS:
            return
        self._sent.add(text)
        with suppress(Exception):  # a warning must not end what it warns of
            self._emit(text if len(self._sent) <= MAX_TEXTS else MORE_WARNINGS)
