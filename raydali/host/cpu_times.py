"""CPU times of this process and of the host's cores, and the start of a process, read from /proc."""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path

from raydali.host.child import RUNNING
from raydali.text import plural

_TICKS = os.sysconf("SC_CLK_TCK")
_PROC_CGROUP, _CGROUPS = "/proc/self/cgroup", "/sys/fs/cgroup"


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTimes:
    """CPU times in seconds since a fixed moment; subtract two of them to measure a period."""

    own: float
    """CPU time of this process and of its children: multiprocessing's, and those that read objects or decode."""
    queued: float
    """Time for which this thread was ready to run and waited for a core."""
    helpers: float
    """CPU time of the other living threads of these processes."""
    helpers_queued: float
    """Time for which those threads were ready to run and waited for a core."""
    busy: float
    """CPU time of all processes, and of other virtual machines, on the cores that this process may use; summed over
    cores."""
    idle: float
    """Idle time of these cores."""

    def __sub__(self, other: "CpuTimes") -> "CpuTimes":
        # The times of threads that have ended are missing, so a difference may be negative.
        return CpuTimes(**{name: max(0.0, getattr(self, name) - getattr(other, name)) for name in self.__slots__})


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity, limited by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none
    return max(1, min([cores, *(math.ceil(quota) for quota in _quotas())]))


def load() -> str:
    """Describe how busy the machine is."""
    busy, cores = os.getloadavg()[0], usable_cores()
    return f"{'the machine is busy, ' if busy > cores else ''}load average {busy:.1f} on {plural(cores, 'core')}"


def _quotas() -> Iterator[float]:
    """Yield the quotas of this process's control groups, in cores."""
    with suppress(OSError, ValueError):
        for line in Path(_PROC_CGROUP).read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = Path(_CGROUPS, "cpu") if controllers else Path(_CGROUPS)
            group = root / path.lstrip("/")
            # Inside a container, the group is mounted as the root, but may have its path outside the container.
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
    """Return the current times, or None without /proc; takes about a millisecond with 200 threads."""
    try:
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        ticks = [list(map(int, numbers[:8])) for core, *numbers in rows if core in cores]
        threads = _threads("/proc/self")
        _, queued = threads.pop(str(threading.get_native_id()))
    except (OSError, AttributeError, ValueError, IndexError, KeyError):
        return None
    idle = sum(core[3] + core[4] for core in ticks) / _TICKS  # waiting for a disk counts as idle
    children = [*RUNNING, *(child.pid for child in active_children())]
    of_children = [times for child in children for times in _threads(f"/proc/{child}").values()]
    helpers = [*threads.values(), *of_children]
    busy = sum(map(sum, ticks)) / _TICKS - idle
    return CpuTimes(
        own=time.process_time() + sum(ran for ran, _ in of_children),
        queued=queued,
        helpers=sum(ran for ran, _ in helpers),
        helpers_queued=sum(waited for _, waited in helpers),
        busy=busy,
        idle=idle,
    )


def start_ticks(pid: int) -> int | None:
    """Return when a process of this machine started, in ticks since boot; None if it does not exist.

    This and the process id identify a process, since ids are reused. psutil's start times depend on the clock, and are
    not the same in all processes.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return None


def _threads(process: str) -> dict[str, tuple[float, float]]:
    """Return by its id each thread's seconds on a core, and its seconds of waiting for one."""
    times = {}
    # Paths relative to an open folder, and no buffers: a training process has hundreds of threads, and a step waits.
    with suppress(OSError), _opened(f"{process}/task") as tasks:
        for thread in os.scandir(tasks):
            with suppress(OSError, ValueError), _opened(f"{thread.name}/schedstat", tasks) as file:  # it may have ended
                ran, waited, _ = os.read(file, 100).split()
                times[thread.name] = int(ran) / 1e9, int(waited) / 1e9
    return times


@contextmanager
def _opened(path: str, folder: int | None = None) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
