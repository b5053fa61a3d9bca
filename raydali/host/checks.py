"""Checks of hosts. Each result is a row with a status, the value that was found, and a remedy after a failure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

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

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` shows."""
        return asdict(self)


def rows(nodes: list[Node]) -> list[Row]:
    """Check nodes; nodes with the same result share a row."""
    found = [row for node in nodes for row in _of(node)]
    answered = {node.name: node.host for node in nodes if node.host is not None}
    found += _versions(answered)
    return _merged(found)


def failed_checks() -> list[str]:
    """Return a line for each failed check of this GPU host that affects training; takes milliseconds."""
    host = this_host()
    found = [check(Node(name=host.name), host) for check in (_driver, _nvjpeg, _shared_memory)]
    return [f"{host.name}: {row.check}: {row.found}: {row.remedy}" for row in found if row.status == "fail"]


def _merged(found: list[Row]) -> list[Row]:
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for row in found:
        merged.setdefault((row.check, row.status, row.found, row.remedy), []).extend(row.nodes)
    order = list(dict.fromkeys(row.check for row in found))
    together = [
        Row(check=check, nodes=tuple(names), status=status, found=what, remedy=remedy)  # type: ignore[arg-type]
        for (check, status, what, remedy), names in merged.items()
    ]
    return sorted(together, key=lambda row: order.index(row.check))


def _of(node: Node) -> list[Row]:
    if node.host is None:
        return [_row(node, "answers", "fail", node.silence, "look at its raylet.out, or take it out of the cluster")]
    found = [check(node, node.host) for check in (_driver, _nvjpeg, _nvdec, _memory, _shared_memory, _open_files)]
    if node.skew is not None:
        found.append(_clock(node, *node.skew))
    if node.storage is not None:
        remedy = "give a folder that all nodes share, or an object store and its credentials on every node"
        found.append(
            _row(node, "storage", "fail", node.storage, remedy)
            if node.storage
            else _row(node, "storage", "ok", "written and read")
        )
    return found


def _row(node: Node, check: str, status: Status, found: str, remedy: str = "") -> Row:
    return Row(check=check, nodes=(node.name,), status=status, found=found, remedy=remedy)


def _on_gpu(check: str) -> Callable[[Callable[[Node, Host], Row]], Callable[[Node, Host], Row]]:
    """Return a decorator for a check that is skipped on hosts without a GPU."""

    def wrap(function: Callable[[Node, Host], Row]) -> Callable[[Node, Host], Row]:
        return lambda node, host: function(node, host) if host.has_gpu else _row(node, check, "none", "no GPU")

    return wrap


@_on_gpu("driver")
def _driver(node: Node, host: Host) -> Row:
    if not host.driver:
        remedy = "install NVIDIA's driver; in a container, start it with the NVIDIA runtime (--gpus all)"
        return _row(node, "driver", "fail", "GPUs, but no driver that answers", remedy)
    least = DRIVER_OF_CUDA.get(int(host.cuda.partition(".")[0] or 12), DRIVER_OF_CUDA[13])
    there = tuple(int(part) for part in host.driver.split(".")[:2])
    if there < least:
        wanted = ".".join(map(str, least))
        remedy = f"update the driver to {wanted} or newer, or install a torch that was built for an older CUDA"
        return _row(node, "driver", "fail", f"{host.driver}, too old for torch's CUDA {host.cuda}", remedy)
    return _row(node, "driver", "ok", host.driver)


@_on_gpu("nvJPEG")
def _nvjpeg(node: Node, host: Host) -> Row:
    if host.nvjpeg:
        return _row(node, "nvJPEG", "fail", host.nvjpeg, NVJPEG_REMEDY)
    return _row(node, "nvJPEG", "ok", "loads")


@_on_gpu("NVDEC")
def _nvdec(node: Node, host: Host) -> Row:
    if host.nvdec:
        return _row(node, "NVDEC", "fail", host.nvdec, NVDEC_REMEDY)
    return _row(node, "NVDEC", "ok", "loads")


NVJPEG_REMEDY = "pip install nvidia-nvjpeg-cu12, or DALI decodes JPEGs on the CPU"
NVDEC_REMEDY = "in a container, add video to NVIDIA_DRIVER_CAPABILITIES; else install the driver's libnvidia-decode"


@_on_gpu("GPU memory")
def _memory(node: Node, host: Host) -> Row:
    if not host.gpus:
        return _row(node, "GPU memory", "none", "the driver does not report it")
    names = sorted({gpu.name for gpu in host.gpus})
    gpus = f"{len(host.gpus)} x {' and '.join(names)}"
    full = [str(index) for index, gpu in enumerate(host.gpus) if gpu.free < LEAST_FREE * gpu.total]
    if full:
        least = min(gpu.free for gpu in host.gpus) / GIB
        remedy = "end the processes that use it, which nvidia-smi lists"
        return _row(node, "GPU memory", "fail", f"{gpus}; {least:.0f} GiB free on {', '.join(full)}", remedy)
    free = min(gpu.free / gpu.total for gpu in host.gpus)
    return _row(node, "GPU memory", "ok", f"{gpus}, at least {math.floor(100 * free)}% free")


def _shared_memory(node: Node, host: Host) -> Row:
    found = f"{host.shared_memory / GIB:.2f} GiB"
    if host.shared_memory < LEAST_SHARED_MEMORY:
        remedy = "1 GiB or more: --shm-size=8g for Docker, an emptyDir with medium: Memory at /dev/shm for Kubernetes"
        return _row(node, "/dev/shm", "fail", found, remedy)
    return _row(node, "/dev/shm", "ok", found)


def _open_files(node: Node, host: Host) -> Row:
    if host.open_files < LEAST_OPEN_FILES:
        remedy = f"{LEAST_OPEN_FILES} or more: ulimit -Hn, LimitNOFILE of systemd, or --ulimit nofile of Docker"
        return _row(node, "open files", "fail", str(host.open_files), remedy)
    return _row(node, "open files", "ok", str(host.open_files) if host.open_files < 2**31 else "no limit")


def _clock(node: Node, ahead: float, error: float) -> Row:
    if abs(ahead) - error > MAX_SKEW:
        return _row(node, "clock", "fail", f"{ahead:+.1f} s", "start chronyd or systemd-timesyncd")
    return _row(node, "clock", "ok", f"within {MAX_SKEW:g} s")


def _versions(hosts: Mapping[str, Host]) -> list[Row]:
    """Return a row for each version of each package; raydali may be missing, since a job can bring it along."""
    found = []
    for package in dict.fromkeys(name for host in hosts.values() for name in host.versions):
        by_version: dict[str, list[str]] = {}
        for node, host in hosts.items():
            by_version.setdefault(host.versions[package], []).append(node)
        common = max(by_version, key=lambda version: (bool(version), len(by_version[version])))
        for version, nodes in by_version.items():
            if not version and package == "raydali":
                row = ("ok", "not installed: it travels with the job", "")
            elif version == common and version:
                row = ("ok", version, "")
            else:
                remedy = f"install {common}, as on other nodes" if common else "install all of requirements.lock"
                row = ("fail", version or "not installed", remedy)
            status, what, remedy = row
            found.append(Row(check=package, nodes=tuple(nodes), status=status, found=what, remedy=remedy))  # type: ignore[arg-type]
    return found
