"""The processes of one cluster, and no others: found by a mark in their environment, by session and by parent (/proc).

The head is started with the mark and in a session of its own; what it starts inherits both. Ray's Python processes
write their title over their environment, but stay in the session; the drivers of jobs get sessions of their own, but
keep the mark.
"""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "RAYDALI_CLUSTER"
"""The environment variable that holds the mark."""
GRACE_SECONDS = 4.0
KILL_SECONDS = 15.0


def start_ticks(pid: int) -> int | None:
    """Return when a process of this machine started, in ticks since boot; None if there is none. Together with its id
    this identifies a process, since ids are reused."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


@dataclass(frozen=True)
class Process:
    """A process; the time of its start, in ticks since the machine's, tells it from a later one of the same id."""

    pid: int
    started: int
    parent: int
    session: int

    @property
    def same(self) -> tuple[int, int]:
        """What does not change while it lives."""
        return self.pid, self.started

    @property
    def command(self) -> str:
        """Its command line, or an empty text once it is gone."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return ""


def members(mark: str, known: list[Process] | None = None) -> list[Process]:
    """All living processes of the cluster with this mark.

    Args:
        mark: the value of the environment variable.
        known: processes that were members a moment ago, in case what tells them is gone by now.
    """
    running = _running()
    before = {process.same for process in known or []}
    roots = [process for process in running if _has_mark(process.pid, mark)]
    sessions = {process.session for process in roots} - {0}
    found = {p.pid for p in running if p in roots or p.session in sessions or p.same in before}
    grew = True
    while grew:
        children = {process.pid for process in running if process.parent in found} - found
        found |= children
        grew = bool(children)
    return [process for process in running if process.pid in found - {os.getpid()}]


def end(mark: str) -> list[Process]:
    """End the cluster's processes: at first they are asked, then killed; those that are left, none but for a bug."""
    left = members(mark)
    _signal(left, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = members(mark, left)
    deadline = time.monotonic() + KILL_SECONDS
    while left and time.monotonic() < deadline:
        _signal(left, signal.SIGKILL)
        time.sleep(0.1)
        left = members(mark, left)
    return left


def _signal(processes: list[Process], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def _running() -> list[Process]:
    """This user's processes but for zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            if entry.stat().st_uid != os.getuid():
                continue
            # pid (command) state parent group session ... start, by man 5 proc; a command may hold spaces
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                found.append(
                    Process(int(entry.name), started=int(fields[19]), parent=int(fields[1]), session=int(fields[3]))
                )
    return found


def _has_mark(pid: int, mark: str) -> bool:
    with suppress(OSError):
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return False
