"""Reports to the driver how a worker's training thread proceeds, and what `warnings` and `logging` say in the worker.

Without that, warnings would only appear in the worker's log. The output of C++ code is not reported.
"""

import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from raydali.host import start_clock
from raydali.host.cpu_times import load, start_ticks
from raydali.run.messages import HEARTBEAT_SECONDS, MORE_WARNINGS, Heartbeat, HeartbeatEnded, Message
from raydali.training import worker

_SHOWN_FRAMES = 12
_LIBRARIES = "site-packages"
_COLLECTIVES = worker.__file__
"""The source file of the calls in which ranks wait for each other, outside a backward pass."""
MAX_TEXTS = 20
"""Maximum number of texts per worker; a message that contains a step or a file name may have many texts."""


class HeartbeatThread:
    """Background thread that reports the progress of the thread that creates it.

    Args:
        emit: sends a message to the driver without waiting.
        count: returns the number of batches consumed so far, validation included, and of calls that were retried.
        progress: returns completed steps, plus 0.5 once the next step's batch has arrived; comparable across ranks.
        stack_after: seconds without progress after which heartbeats include the stack trace.
        joules: see `run.messages.Heartbeat`.
        address: rank, group and node_id of this worker; with `node`, see `run.messages.Heartbeat`.
    """

    def __init__(
        self,
        emit: Callable[[Message], None],
        count: Callable[[], int],
        progress: Callable[[], float],
        stack_after: float,
        *,
        joules: Callable[[], float | None] = lambda: None,
        node: str,
        **address: Any,
    ) -> None:
        self._emit, self._count, self._progress, self._stack_after = emit, count, progress, stack_after
        self._joules, self._node, self._address = joules, node, {**address, "pid": os.getpid()}
        self._thread = threading.get_ident()
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="heartbeat").start()

    def close(self) -> None:
        """Stop the background thread."""
        self._closed.set()
        self._emit(HeartbeatEnded(**self._address))

    def _run(self) -> None:
        last, since, started = -1, time.monotonic(), start_ticks(os.getpid())
        while not self._closed.is_set():
            count = self._count()
            if count != last:
                last, since = count, time.monotonic()
            is_stuck = time.monotonic() - since > self._stack_after
            stack, waits = self._stack() if is_stuck else (None, False)
            facts: dict[str, Any] = {"count": count, "progress": self._progress(), "stack": stack, "waits": waits}
            *_, (phase, _) = [("", 0.0), *start_clock.marks()]  # without marks, the first step is complete
            facts |= {"joules": self._joules(), "doing": f"its last phase that ended: {phase}; {load()}"}
            self._emit(Heartbeat(**self._address, node=self._node, started=started, **facts))
            self._closed.wait(HEARTBEAT_SECONDS)

    def _stack(self) -> tuple[str, bool]:
        """Return the thread's stack, and whether the thread waits for other ranks."""
        frame = sys._current_frames().get(self._thread)
        frames = traceback.extract_stack(frame) if frame is not None else []
        ours = [entry for entry in frames if _LIBRARIES not in entry.filename] or frames
        # The innermost frame is shown even if it is in a library: it may be a collective or a read.
        shown = [*ours[-_SHOWN_FRAMES:], *([frames[-1]] if frames and frames[-1] not in ours else [])]
        waits = any(entry.filename == _COLLECTIVES for entry in frames)
        return "".join(traceback.format_list(shown)), waits


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
