"""A worker's background thread that reports the training thread's progress to the driver."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEAT_SECONDS = 2.0
_SHOWN_FRAMES = 12
_OF_LIBRARIES = "site-packages"
_EXCHANGES = os.path.join("raydali", "train", "worker.py")
"""The file in which ranks wait for each other, outside of a backward pass."""


class Heartbeat:
    """A worker's thread that tells how far the thread that made it is.

    Args:
        tell: hands a message to the driver, without waiting.
        count: what grows while training gets on: batches taken, those of validation too, and calls repeated.
        place: how far it is, comparable with that of other ranks: steps done, and a half for the batch of the next.
        patience: seconds of standing still from which on a beat holds the stack.
        facts: who this is.
    """

    def __init__(
        self,
        tell: Callable[..., None],
        count: Callable[[], int],
        place: Callable[[], float],
        patience: float,
        **facts: Any,
    ) -> None:
        self._tell, self._count, self._place, self._patience = tell, count, place, patience
        self._facts = facts | {"pid": os.getpid(), "started": started(os.getpid())}
        self._thread = threading.get_ident()
        self._over = threading.Event()
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def close(self) -> None:
        """Fall silent, for good."""
        self._over.set()
        self._tell("beat", **self._facts, count=-1, place=0.0, stack=None, waits=False)

    def _beat(self) -> None:
        last, since = -1, time.monotonic()
        while not self._over.wait(BEAT_SECONDS):
            count = self._count()
            if count != last:
                last, since = count, time.monotonic()
            stuck = time.monotonic() - since > self._patience
            stack, waits = self._stack() if stuck else (None, False)
            self._tell("beat", **self._facts, count=count, place=self._place(), stack=stack, waits=waits)

    def _stack(self) -> tuple[str, bool]:
        """Return the thread's stack, and whether it waits for other ranks there."""
        frame = sys._current_frames().get(self._thread)
        frames = traceback.extract_stack(frame) if frame is not None else []
        ours = [each for each in frames if _OF_LIBRARIES not in each.filename] or frames
        # Where it is inside a library counts too: a collective, a read.
        shown = [*ours[-_SHOWN_FRAMES:], *([frames[-1]] if frames and frames[-1] not in ours else [])]
        waits = any(each.filename.endswith(_EXCHANGES) for each in frames)
        return "".join(traceback.format_list(shown)), waits


def started(pid: int) -> int | None:
    """When a process started, in ticks since the machine's start: what tells it from another one of the same id; None
    where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None
