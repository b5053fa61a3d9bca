"""How busy the host's cores were, with this process and with others: what /proc says; None where it says nothing."""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC_CGROUP, _CGROUPS = "/proc/self/cgroup", "/sys/fs/cgroup"


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """Seconds up to now, since some moment that does not change. Two of them are subtracted."""

    own: float
    """Computing of this process, and of what it started by multiprocessing."""
    queued: float
    """This thread was ready to run and had to wait for a core."""
    helpers: float
    """Computing of the other threads of these processes, as far as they are still there."""
    helpers_queued: float
    """They were ready to run and had to wait."""
    busy: float
    """Computing of all processes on the cores that this one may use, and of other guests of the machine; the sum over
    cores."""
    idle: float
    """The rest of these cores' time."""

    def __sub__(self, other: "CpuTimes") -> "CpuTimes":
        # Of threads that have ended nothing is known any more.
        return CpuTimes(**{name: max(0.0, getattr(self, name) - getattr(other, name)) for name in self.__slots__})


def usable_cores() -> int:
    """CPU cores that this process may use: those it may run on, and no more than a container's quota gives it."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """Cores that the control groups of this process allow, where they limit them."""
    with suppress(OSError, ValueError):
        for line in Path(_PROC_CGROUP).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = Path(_CGROUPS, "cpu") if controllers else Path(_CGROUPS)
            group = root / path.lstrip("/")
            # Inside a container the group is the root, whatever its path is outside.
            for folder in dict.fromkeys([group, *group.parents, root]):
                if folder == root or folder.is_relative_to(root):
                    with suppress(OSError, ValueError):  # no such file, or "max"
                        if controllers:
                            quota = int((folder / "cpu.cfs_quota_us").read_text())
                            period = int((folder / "cpu.cfs_period_us").read_text())
                        else:
                            quota, period = map(int, (folder / "cpu.max").read_text().split())
                        if quota > 0:
                            yield quota / period


def cpu_times() -> CpuTimes | None:
    """Of this moment and this thread; about a millisecond."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        ticks = [list(map(int, numbers[:8])) for core, *numbers in rows if core in cores]
        _, queued = _scheduled(Path("/proc/thread-self"))
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    idle = sum(core[3] + core[4] for core in ticks) / _TICKS  # waiting for a disk is idle too
    children = [f"/proc/{child.pid}" for child in active_children()]
    here = str(threading.get_native_id())
    own = time.process_time()
    helpers = helpers_queued = 0.0
    for process in ("/proc/self", *children):
        for thread in _threads(process):
            if process == "/proc/self" and thread.name == here:
                continue
            try:
                ran, waited = _scheduled(thread)
            except (OSError, ValueError, IndexError):
                continue  # it has just ended
            helpers += ran
            helpers_queued += waited
            own += ran if process != "/proc/self" else 0.0
    busy = sum(map(sum, ticks)) / _TICKS - idle
    return CpuTimes(own=own, queued=queued, helpers=helpers, helpers_queued=helpers_queued, busy=busy, idle=idle)


def _threads(process: str) -> list[Path]:
    try:
        return list(Path(process, "task").iterdir())
    except OSError:
        return []


def _scheduled(thread: Path) -> tuple[float, float]:
    """Seconds on a core, and of waiting for one."""
    ran, waited, *_ = (thread / "schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9
