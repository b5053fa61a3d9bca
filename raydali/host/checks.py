"""Checks of hosts. Each result is a row with a status, the value that was found, and a remedy after a failure."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from raydali.host.facts import Host, this_host

Status = Literal["ok", "fail", "none"]

DRIVER_OF_CUDA = {12: (525, 60), 13: (580, 65)}
"""The oldest driver for programs that were built with each major version of CUDA (CUDA's release notes, table 3)."""
LEAST_FREE = 0.5
"""Minimum share of a GPU's memory that is free before a run."""
LEAST_SHARED_MEMORY = 1 << 30
"""Minimum size of /dev/shm in bytes: the 64 MiB of containers are too small for NCCL and Ray's object store."""
LEAST_OPEN_FILES = 8192
MAX_SKEW = 2.0
"""Maximum difference of two clocks, in seconds."""
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table; the status is `none` if the host does not need what is checked."""

    check: str
    nodes: tuple[str, ...]
    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a cluster: its host, and facts that only the node itself can find out.

    Attributes:
        host: facts about the host; None if the node did not answer.
        skew: seconds by which its clock is ahead of the driver's, and their uncertainty; None for a single host.
        storage: why the node cannot use --storage; empty if it can; None if this was not checked.
        silence: why the node did not answer.
    """

    name: str
    host: Host | None = None
    skew: tuple[float, float] | None = None
    storage: str | None = None
    silence: str = ""


def rows(nodes: list[Node]) -> list[Row]:
    """Check nodes; nodes with the same result share a row."""
    unmerged = [row for node in nodes for row in _of(node)]
    unmerged += _versions({node.name: node.host for node in nodes if node.host is not None})
    names: dict[Row, list[str]] = {}
    for row in unmerged:
        names.setdefault(replace(row, nodes=()), []).extend(row.nodes)
    order = list(dict.fromkeys(row.check for row in unmerged))
    merged = (replace(row, nodes=tuple(of_row)) for row, of_row in names.items())
    return sorted(merged, key=lambda row: order.index(row.check))


def failed_checks() -> list[str]:
    """Return a line for each failed check of this GPU host that affects training; takes milliseconds."""
    host = this_host()
    checked = [_row(host.name, check, host) for check in ("driver", "nvJPEG", "/dev/shm")]
    return [f"{host.name}: {row.check}: {row.found}: {row.remedy}" for row in checked if row.status == "fail"]


def _of(node: Node) -> list[Row]:
    if node.host is None:
        remedy = "look at its raylet.out, or take it out of the cluster"
        return [Row(check="answers", nodes=(node.name,), status="fail", found=node.silence, remedy=remedy)]
    checked = [_row(node.name, check, node.host) for check in CHECKS]
    if node.skew is not None:
        ahead, error = node.skew
        late = abs(ahead) - error > MAX_SKEW
        result = (f"{ahead:+.1f} s", "start chronyd or systemd-timesyncd") if late else (f"within {MAX_SKEW:g} s", "")
        checked.append(_judged(node.name, "clock", *result))
    if node.storage is not None:
        remedy = "give a folder that all nodes share, or an object store and its credentials on every node"
        result = (node.storage, remedy) if node.storage else ("written and read", "")
        checked.append(_judged(node.name, "storage", *result))
    return checked


def _row(node: str, check: str, host: Host) -> Row:
    if check in ON_GPUS and not host.has_gpu:
        return _judged(node, check, "no GPU", None)
    return _judged(node, check, *CHECKS[check](host))


def _judged(node: str, check: str, value: str, remedy: str | None) -> Row:
    status: Status = "none" if remedy is None else "fail" if remedy else "ok"
    return Row(check=check, nodes=(node,), status=status, found=value, remedy=remedy or "")


Result = tuple[str, str | None]
"""A check returns what it found, and the remedy: empty if all is well, None if the host does not need it."""


def _driver(host: Host) -> Result:
    if not host.driver:
        remedy = "install NVIDIA's driver; in a container, start it with the NVIDIA runtime (--gpus all)"
        return "GPUs, but no driver that answers", remedy
    least = DRIVER_OF_CUDA.get(int(host.cuda.partition(".")[0] or 12), DRIVER_OF_CUDA[13])
    if tuple(int(part) for part in host.driver.split(".")[:2]) < least:
        wanted = ".".join(map(str, least))
        remedy = f"update the driver to {wanted} or newer, or install a torch that was built for an older CUDA"
        return f"{host.driver}, too old for torch's CUDA {host.cuda}", remedy
    return host.driver, ""


def _nvjpeg(host: Host) -> Result:
    remedy = "pip install nvidia-nvjpeg-cu12, or DALI decodes JPEGs on the CPU"
    return (host.nvjpeg, remedy) if host.nvjpeg else ("loads", "")


def _nvdec(host: Host) -> Result:
    remedy = "in a container, add video to NVIDIA_DRIVER_CAPABILITIES; else install the driver's libnvidia-decode"
    return (host.nvdec, remedy) if host.nvdec else ("loads", "")


def _memory(host: Host) -> Result:
    if not host.gpus:
        return "the driver does not report it", None
    gpus = f"{len(host.gpus)} x {' and '.join(sorted({gpu.name for gpu in host.gpus}))}"
    full = [str(index) for index, gpu in enumerate(host.gpus) if gpu.free < LEAST_FREE * gpu.total]
    if full:
        least = min(gpu.free for gpu in host.gpus) / GIB
        remedy = "end the processes that use it, which nvidia-smi lists"
        return f"{gpus}; {least:.0f} GiB free on {', '.join(full)}", remedy
    free = min(gpu.free / gpu.total for gpu in host.gpus)
    return f"{gpus}, at least {math.floor(100 * free)}% free", ""


def _shared_memory(host: Host) -> Result:
    remedy = "1 GiB or more: --shm-size=8g for Docker, an emptyDir with medium: Memory at /dev/shm for Kubernetes"
    return f"{host.shared_memory / GIB:.2f} GiB", remedy if host.shared_memory < LEAST_SHARED_MEMORY else ""


def _open_files(host: Host) -> Result:
    remedy = f"{LEAST_OPEN_FILES} or more: ulimit -Hn, LimitNOFILE of systemd, or --ulimit nofile of Docker"
    limit = str(host.open_files) if host.open_files < 2**31 else "no limit"
    return limit, remedy if host.open_files < LEAST_OPEN_FILES else ""


CHECKS: dict[str, Callable[[Host], Result]] = {
    "driver": _driver,
    "nvJPEG": _nvjpeg,
    "NVDEC": _nvdec,
    "GPU memory": _memory,
    "/dev/shm": _shared_memory,
    "open files": _open_files,
}
ON_GPUS = {"driver", "nvJPEG", "NVDEC", "GPU memory"}
"""The checks of hosts with GPUs only."""


def _versions(hosts: Mapping[str, Host]) -> list[Row]:
    """Return a row for each version of each package; raydali may be missing, since a job can bring it along."""
    of_packages = []
    for package in dict.fromkeys(name for host in hosts.values() for name in host.versions):
        amounts = Counter(host.versions[package] for host in hosts.values())
        common = max(amounts, key=lambda version: (bool(version), amounts[version]))
        for name, host in hosts.items():
            version = host.versions[package]
            if not version and package == "raydali":
                result = "not installed: it travels with the job", ""
            elif version == common and version:
                result = version, ""
            else:
                remedy = f"install {common}, as on other nodes" if common else "install all of requirements.lock"
                result = version or "not installed", remedy
            of_packages.append(_judged(name, package, *result))
    return of_packages
