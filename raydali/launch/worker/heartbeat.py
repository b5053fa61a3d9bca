"""A worker's background thread that reports the training thread's progress to the driver."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from raydali.host import start_clock
from raydali.host.cpu_times import load
from raydali.host.processes import start_ticks
from raydali.run.messages import HEARTBEAT_SECONDS, Heartbeat, HeartbeatEnded, Message
from raydali.training import worker

_SHOWN_FRAMES = 12
_LIBRARIES = "site-packages"
_COLLECTIVES = worker.__file__
"""The source file of the calls in which ranks wait for each other, outside a backward pass."""


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
