"""The processes of one cluster, found by a mark in their environment, by session and by parent.

The head is started with the mark and in a new session, and its child processes inherit both. Ray's Python processes
overwrite their environment with their title, but stay in the session. The drivers of jobs get new sessions, but keep
the mark.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

MARK = "RAYDALI_CLUSTER"
"""The name of the environment variable whose value is the mark."""
GRACE_SECONDS = 4.0
KILL_SECONDS = 15.0


def members(mark: str, earlier: Iterable[psutil.Process] = ()) -> list[psutil.Process]:
    """Return all living processes of the cluster with this mark.

    Args:
        mark: the value of the environment variable.
        earlier: members at an earlier time, which are kept even if the ancestor by which they were found has ended.
    """
    running = _running()
    marked = {process for process in running if _has_mark(process, mark)}
    sessions = {running[process] for process in marked} - {0}
    in_cluster = marked | {process for process, session in running.items() if session in sessions}
    in_cluster |= running.keys() & {*earlier}
    for process in [*in_cluster]:
        with suppress(psutil.Error):
            in_cluster |= {*process.children(recursive=True)}
    return [process for process in running if process in in_cluster and process.pid != os.getpid()]


def end(mark: str) -> list[psutil.Process]:
    """End the cluster's processes by SIGTERM, then by SIGKILL; return those that are left, normally none."""
    remaining = members(mark)
    send(remaining, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while remaining and time.monotonic() < deadline:
        time.sleep(0.1)
        remaining = members(mark, remaining)
    return kill(mark, remaining, KILL_SECONDS)


def kill(mark: str, remaining: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Send SIGKILL to these members, and to those that they start meanwhile; return those that are left."""
    deadline = time.monotonic() + seconds
    while remaining and time.monotonic() < deadline:
        send(remaining, signal.SIGKILL)
        time.sleep(0.1)
        remaining = members(mark, remaining)
    return remaining


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to the processes that have not ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _running() -> dict[psutil.Process, int]:
    """Return the session of each of this user's processes, without zombies."""
    sessions = {}
    for pid in psutil.pids():  # process_iter caches objects, whose ids may be reused
        with suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            with process.oneshot():
                if process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
                    sessions[process] = os.getsid(pid)
    return sessions


def _has_mark(process: psutil.Process, mark: str) -> bool:
    with suppress(psutil.Error, OSError):
        return bool(process.environ().get(MARK) == mark)
    return False
