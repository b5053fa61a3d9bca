"""Processes that measure together: they end in time, say why one failed, and leave nothing behind."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from raydali.bench.processes import MeasurementError, run_ranks
from tests.support.messages import mentioning

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


def sleep(seconds: float, *_: int) -> str:
    subprocess.Popen(["sleep", str(seconds)])
    time.sleep(seconds)
    return "done"


def fail_on_rank_1(folder: str, rank: int, _: int) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        raise ValueError("this is rank 1")
    time.sleep(100)


@pytest.mark.slow
def test_ranks_are_ended_in_time() -> None:
    seconds = 1234.5
    with pytest.raises(MeasurementError, match=mentioning("3 --timeout")):
        run_ranks(sleep, seconds, 1, timeout=3)
    # What they started is killed too, and gone soon after.
    while ["sleep", str(seconds)] in [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]:
        time.sleep(0.01)


def test_one_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match=mentioning("rank 1")):
        run_ranks(fail_on_rank_1, str(tmp_path), 2, timeout=240)
    written = filter(None, (file.read_text() for file in tmp_path.iterdir()))  # one may be ended before it could write
    assert not any(Path("/proc", pid).exists() for pid in written)
