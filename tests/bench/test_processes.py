"""Processes that measure together leave nothing behind."""

import multiprocessing
import subprocess
import sys
from typing import Any

_held: list[Any] = []


def hold_a_lock(*_: object) -> None:
    """As tqdm does, which torch.compile imports."""
    _held.append(multiprocessing.RLock())


def test_killed_ranks_leave_no_semaphores() -> None:
    code = (
        "from raydali.bench.processes import run_ranks\n"
        "from tests.bench.test_processes import hold_a_lock\n"
        "print(run_ranks(hold_a_lock, None, 2, timeout=60))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("[None, None]", "")
