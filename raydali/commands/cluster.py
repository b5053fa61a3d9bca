"""Starts, shows and stops an autoscaling Ray cluster on this machine only, for trials and tests: `raydali cluster`.

    raydali cluster up
    source /tmp/raydali-1000/env
    ray job submit --working-dir . -- python jobs/imagenet.py --workers 3
    raydali cluster down

The nodes are processes, and their GPUs are declared but do not exist. Access requires a random token.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import Any
from urllib.request import Request, urlopen

from raydali.errors import CommandError, UsageError
from raydali.host import cluster_processes
from raydali.output import JsonFile, log_tail, require_writable, write_json
from raydali.text import duration, plural

STANDARD = Path(__file__).with_name("cluster.yaml")
"""The configuration of a cluster without --file."""
STATE = "raydali-cluster.json"
"""A file with the addresses of the head and the dashboard, and the time of the start. Its folder may be deleted."""
NOT_INHERITED = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_RUNTIME_ENV", "RAY_JOB_CONFIG_JSON_ENV_VAR")
HEAD_ENVIRONMENT = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_JOB_STOP_WAIT_TIME_S": "60",
}
"""Environment of every head, in addition to Ray's defaults. Ray gives up a node whose processes have ended after 5 s
instead of 15, and an unreachable node after 20 s instead of 65. A stopped job has 60 s instead of 3 for its last
checkpoint."""


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    folder: str | None = None
    """Folder for the cluster's files, token included; a short path. Default: /tmp/raydali-UID."""


@dataclass(frozen=True, kw_only=True)
class Up(_Cluster):
    """Start the cluster: a head that runs no workers, and nodes on demand."""

    file: str | None = None
    """YAML file with node types, limits and idle timeout, in the format of `ray up`. Default: raydali's own."""
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
        UsageError: an option is invalid, or the head does not start; the message has the end of its log.
        CommandError: there is no cluster to show, or a process cannot be ended.
    """
    folder = Path(options.folder or f"/tmp/raydali-{os.getuid()}").expanduser().resolve()
    if isinstance(options, Up):
        _up(options, folder)
    elif isinstance(options, Down):
        _down(folder)
    else:
        _status(options, folder)


def _up(options: Up, folder: Path) -> None:
    from ray.util import get_node_ip_address

    if cluster_processes.members(str(folder)):
        raise UsageError(f"a cluster is up in {folder}: run raydali cluster down, or give another --folder")
    config, resources = _read_config(options.file or str(STANDARD))
    address = get_node_ip_address()
    port, dashboard_port, client_port = _free_ports([options.port, options.dashboard_port, options.client_port])
    head, dashboard = f"{address}:{port}", f"http://127.0.0.1:{dashboard_port}"
    try:
        if (folder / STATE).exists():  # of a cluster whose processes have ended
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise UsageError(f"--folder {folder} cannot be created: {error.strerror}; give another one") from error
    config["provider"] |= {"gcs_address": head, "module": f"{__name__}.node_provider"}
    (folder / STATE).write_text(json.dumps({"head": head, "dashboard": dashboard, "started": time.time()}))
    (folder / "config.yaml").write_text(json.dumps(config, indent=1))  # JSON is YAML
    (folder / "token").write_text(secrets.token_hex(32))
    variables = f"RAY_ADDRESS={dashboard} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={folder}/token"
    (folder / "env").write_text(f"export {variables}\nunset RAY_AUTH_TOKEN\n")
    arguments = [f"--port={port}", f"--node-ip-address={address}", f"--ray-client-server-port={client_port}"]
    arguments += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard_port}"]
    arguments += [f"--num-cpus={resources.get('CPU', 0)}", f"--num-gpus={resources.get('GPU', 0)}"]
    try:
        _start_head(folder, config, arguments, options.timeout)
    except BaseException:
        cluster_processes.end(str(folder))
        raise
    print(f"the cluster is up: {dashboard}, and {head} for ray start; its files are in {folder}")
    print(f"to use it, run: source {folder}/env")


def _read_config(file: str) -> tuple[dict[str, Any], dict[str, float]]:
    """Read the configuration of a cluster on one machine; return it, and the resources of its head."""
    import yaml

    try:
        config: dict[str, Any] = yaml.safe_load(Path(file).expanduser().read_text())
        if "head_node_id" not in config["provider"]:
            raise UsageError(f"--file {file} is for several machines, unlike {STANDARD}: start it with ray up")
        return config, config["available_node_types"][config["head_node_type"]]["resources"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(f"--file {file} cannot be used: {reason}; give one like {STANDARD}") from None


def _free_ports(ports: list[int]) -> list[int]:
    """Replace each 0 by a free port, and refuse a port that is in use."""
    try:
        with ExitStack() as stack:
            servers = [stack.enter_context(socket.create_server(("", port))) for port in ports]
            return [server.getsockname()[1] for server in servers]
    except (OSError, OverflowError) as error:
        raise UsageError(f"{error}: give another --port, --dashboard-port or --client-port, or 0 for any") from None


def _start_head(folder: Path, config: dict[str, Any], arguments: list[str], timeout: float) -> None:
    """Start the head, and wait until it accepts jobs."""
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *arguments]
    command += [f"--temp-dir={folder}/ray", f"--autoscaling-config={folder}/config.yaml"]
    command += ["--dashboard-agent-listen-port=0", "--disable-usage-stats"]
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env = inherited | {
        cluster_processes.MARK: str(folder),
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', os.defpath)}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{folder}/token",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_NODE_TYPE_NAME": config["head_node_type"],
        "RAY_CLOUD_INSTANCE_ID": config["provider"]["head_node_id"],
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_worker_niceness": inherited.get("RAY_worker_niceness", "0"),  # as for a Ray of our own
        **HEAD_ENVIRONMENT,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    log = folder / "head.log"
    with log.open("wb") as out:
        head = subprocess.Popen(
            command, env=env, stdin=DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
        )
    deadline = time.monotonic() + timeout
    while head.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            if _nodes(folder):
                return
        time.sleep(0.3)
    what = f"does not answer within {timeout:g} s" if head.poll() is None else f"ended with {head.poll()}"
    raise UsageError(f"the head {what}; the end of its log, {log}:\n{log_tail(log)}")


def _down(folder: Path) -> None:
    if not (folder / STATE).exists():
        print(f"there is no cluster in {folder}")
        return
    number = len(cluster_processes.members(str(folder)))
    if remaining := cluster_processes.end(str(folder)):
        raise CommandError(f"processes cannot be ended: {', '.join(str(process.pid) for process in remaining)}")
    shutil.rmtree(folder)
    print(f"the cluster is down: {plural(number, 'process')} ended, {folder} is deleted")


def _status(options: Status, folder: Path) -> None:
    require_writable("--json", options.json)
    number = len(cluster_processes.members(str(folder)))
    if not number:
        raise CommandError(f"no cluster is up in {folder}: start one with raydali cluster up")
    try:
        state, nodes = json.loads((folder / STATE).read_text()), _nodes(folder)
    except OSError as error:
        raise CommandError(f"the cluster in {folder} has {plural(number, 'process')}, but: {error}") from None
    if options.json:
        write_json({**state, "processes": number, "nodes": nodes}, options.json)
    up = duration(time.time() - state["started"])
    print(f"running for {up}: {state['dashboard']}, {plural(number, 'process')}, files in {folder}")
    for node in sorted(nodes, key=lambda node: not node["head"]):
        kind, key = "head" if node["head"] else "node", node["id"]
        print(f"{kind}  {key[:4]}...{key[-4:]}  {plural(node['cpus'], 'CPU')}, {plural(node['gpus'], 'GPU')}")


def _nodes(folder: Path) -> list[dict[str, Any]]:
    """List the nodes that are alive, with id, head, cpus and gpus.

    Raises:
        OSError: the dashboard does not answer.
    """
    dashboard, token = json.loads((folder / STATE).read_text())["dashboard"], (folder / "token").read_text()
    request = Request(f"{dashboard}/api/v0/nodes?limit=1000", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request, timeout=10) as reply:
        nodes = json.load(reply)["data"]["result"]["result"]
    return [
        {
            "id": node["node_id"],
            "head": node["is_head_node"],
            "cpus": node["resources_total"].get("CPU", 0),
            "gpus": node["resources_total"].get("GPU", 0),
        }
        for node in nodes
        if node["state"] == "ALIVE"
    ]


def node_provider(config: dict[str, Any], cluster_name: str) -> object:
    """Return Ray's provider of nodes on this machine, changed so that each node has its own folder for files of jobs.

    Before its first process for a job, a node unpacks the job's `--working-dir`, and removes what is in its place. In a
    folder of all nodes, that is the working directory of processes on other nodes. They can then import nothing, and
    MKL, a part of torch, ends a process that has no working directory.
    """
    from ray._private import ray_constants
    from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider

    class Provider(FakeMultiNodeProvider):
        def _next_hex_node_id(self) -> str:
            node: str = super()._next_hex_node_id()  # type: ignore[no-untyped-call]
            ray_constants.DEFAULT_RUNTIME_ENV_DIR_NAME = f"runtime_resources_{node}"  # of the node that is created now
            return node

        def _terminate_node(self, node: dict[str, Any]) -> None:
            super()._terminate_node(node)  # type: ignore[no-untyped-call]
            shutil.rmtree(node["node"].get_runtime_env_dir_path(), ignore_errors=True)

    return Provider(config, cluster_name)
