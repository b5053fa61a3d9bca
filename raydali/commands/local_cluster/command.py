"""`raydali cluster`: an autoscaling Ray cluster on this machine only, configured by local.yaml.

    raydali cluster up
    source /tmp/raydali-1000/env
    ray job submit --working-dir . -- python jobs/imagenet.py --workers 3
    raydali cluster down

The nodes are processes, and their GPUs are declared but do not exist. Access requires a random token.
"""

import shutil
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from raydali.commands.local_cluster import head
from raydali.errors import UsageError
from raydali.host import processes
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import duration, plural


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    folder: str | None = None
    """Folder for the cluster's files, token included; a short path. Default: /tmp/raydali-UID."""


@dataclass(frozen=True, kw_only=True)
class Up(_Cluster):
    """Start the cluster: a head that runs no workers, and nodes on demand."""

    file: str | None = None
    """YAML file with node types, limits and idle timeout, in the format of `ray up`. Default: local.yaml of raydali."""
    port: int = 26379
    """Port of Ray itself, at this machine's address; 0: any free port."""
    dashboard_port: int = 28265
    """Port of the dashboard, which accepts jobs, on this machine only; 0: any free port."""
    client_port: int = 26380
    """Port of Ray's client server; 0: any free port."""
    timeout: float = 120.0
    """Maximum duration of the start, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Down(_Cluster):
    """Stop the cluster: end all its processes and no others, and delete its files."""


@dataclass(frozen=True, kw_only=True)
class Status(_Cluster):
    """Show the cluster's nodes. Exit code 1: no cluster is running."""

    json: JsonFile = None


def main(options: Up | Down | Status) -> None:
    """Run the command of these options.

    Raises:
        UsageError: an option is invalid.
    """
    folder = head.checked_folder(options.folder)
    if isinstance(options, Up):
        _up(options, folder)
    elif isinstance(options, Down):
        _down(folder)
    else:
        _status(options, folder)


def _up(options: Up, folder: Path) -> None:
    from ray.util import get_node_ip_address

    earlier = head.read_folder(folder)
    if earlier is not None:
        if processes.members(earlier.mark):
            raise UsageError(f"a cluster is up in {folder}: run raydali cluster down, or give another --folder")
        shutil.rmtree(folder)
    config = head.config_of(options.file or head.STANDARD)
    ports = head.Ports.checked(options.port, options.dashboard_port, options.client_port)
    cluster = head.State(
        mark=uuid.uuid4().hex,
        head=f"{get_node_ip_address()}:{ports.ray}",
        dashboard=f"http://127.0.0.1:{ports.dashboard}",
        started=time.time(),
    )
    head.create_folder(folder, cluster)
    try:
        head.start(folder, cluster, ports, config, timeout=options.timeout)
    except BaseException:
        processes.end(cluster.mark)
        raise
    print(f"the cluster is up: {cluster.dashboard}, and {cluster.head} for ray start; its files are in {folder}")
    print(f"to use it, run: source {folder}/env")


def _down(folder: Path) -> None:
    cluster = head.read_folder(folder)
    if cluster is None:
        print(f"there is no cluster in {folder}")
        return
    number = len(processes.members(cluster.mark))
    left = processes.end(cluster.mark)
    if left:
        listed = "; ".join(f"{process.pid} {processes.command_line(process)[:60]}" for process in left)
        print(f"error: {plural(len(left), 'process')} cannot be ended: {listed}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)
    print(f"the cluster is down: {plural(number, 'process')} ended, {folder} is deleted")


def _status(options: Status, folder: Path) -> None:
    require_writable("--json", options.json)
    cluster = head.read_folder(folder)
    running = processes.members(cluster.mark) if cluster is not None else []
    if cluster is None or not running:
        print(f"no cluster is up in {folder}: start one with raydali cluster up")
        sys.exit(1)
    try:
        nodes = head.nodes(folder, cluster)
    except OSError as error:
        print(f"{cluster.dashboard} does not answer ({plural(len(running), 'process')}, files in {folder}): {error}")
        sys.exit(1)
    if options.json:
        found = {"dashboard": cluster.dashboard, "head": cluster.head, "processes": len(running)}
        write_json(found | {"nodes": nodes}, options.json)
    up = duration(time.time() - cluster.started)
    print(f"running for {up}: {cluster.dashboard}, {plural(len(running), 'process')}, files in {folder}")
    for node in sorted(nodes, key=lambda node: not node["head"]):
        kind, key = "head" if node["head"] else "node", node["id"]
        print(f"{kind}  {key[:4]}...{key[-4:]}  {plural(node['cpus'], 'CPU')}, {plural(node['gpus'], 'GPU')}")
