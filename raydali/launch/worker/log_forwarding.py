"""Forward warnings from `warnings` and `logging` in a worker to the driver.

Otherwise they would only appear in the worker's log. The output of C++ code is not forwarded.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from raydali.run.messages import MORE_WARNINGS

MAX_TEXTS = 20
"""Maximum number of texts per worker; a message that contains a step or a file name may have many texts."""


@contextmanager
def forwarded_warnings(emit: Callable[[str], None]) -> Iterator[None]:
    """Forward the warnings and errors of this process inside this context, each text once. The logs keep them too.

    Args:
        emit: called with a text, at any time and from any thread.
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
            handler.forward(f"{category.__name__}: {message} ({filename}:{lineno})")

    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    # Loggers of PyTorch and others do not propagate. The driver already receives what Ray's loggers report.
    apart = [logger for logger in loggers if not logger.propagate and logger.name.partition(".")[0] != "ray"]
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
        self.forward(f"{record.getMessage()}{why}" + (f" ({record.name})" if record.name != "root" else ""))

    def forward(self, text: str) -> None:
        if os.getpid() != self._process:  # a forked process must not use its parent's connections
            return
        if text in self._sent or len(self._sent) > MAX_TEXTS:
            return
        self._sent.add(text)
        with suppress(Exception):  # a warning must not end the run
            self._emit(text if len(self._sent) <= MAX_TEXTS else MORE_WARNINGS)
