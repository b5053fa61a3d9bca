"""A cluster on this machine: its folder, its head, and its nodes.

The folder contains:

cluster.json   the addresses of the cluster and the mark of its processes
token          authorizes the use of the cluster; mode 600
env            shell variables: after `source env`, `ray` and `raydali` use this cluster
config.yaml    the configuration of the autoscaler
head.log       the output of the head
ray/           Ray's temporary folder
"""

import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from raydali.errors import UsageError
from raydali.host.processes import MARK
from raydali.output import log_tail

if TYPE_CHECKING:
    from raydali.run.folder import Json

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
STANDARD = str(Path(__file__).with_name("local.yaml"))
"""The configuration of a cluster without --file."""
PROVIDER = "raydali.commands.local_cluster.provider.LocalNodeProvider"
"""Replaces the provider of the configuration, which is Ray's."""
MAX_FOLDER_LENGTH = 40
"""Maximum number of characters: Ray's sockets are in the folder, and a socket's path has at most 107."""


@dataclass(frozen=True, kw_only=True)
class State:
    """A cluster that was started.

    Attributes:
        mark: the value of an environment variable by which its processes are found.
        head: address of Ray's own port, for `ray start --address`.
        dashboard: address for `ray job submit`.
        started: seconds since 1970.
    """

    mark: str
    head: str
    dashboard: str
    started: float


def checked_folder(folder: str | None) -> Path:
    """Return the absolute path of a folder; None: the default one of this user.

    Raises:
        UsageError: the path is too long for Ray's sockets.
    """
    path = Path(folder or f"/tmp/raydali-{os.getuid()}").expanduser().absolute()
    if len(str(path)) > MAX_FOLDER_LENGTH:
        raise UsageError(
            f"--folder {path} has {len(str(path))} characters, and Ray's sockets in it allow {MAX_FOLDER_LENGTH}: "
            "give a shorter one, such as /tmp/r"
        )
    return path


def create_folder(folder: Path, state: State) -> None:
    """Create the folder, accessible to this user only, with files that describe the cluster, and a new token.

    Raises:
        UsageError: the folder exists and is not an empty folder of this user, or it cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        there = folder.lstat()
        if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or any(folder.iterdir()):
            raise UsageError(f"--folder {folder} has other contents: give another one") from None
        folder.chmod(0o700)
    except OSError as error:
        raise UsageError(f"--folder {folder} cannot be created: {error.strerror}; give another one") from error
    secret = folder / "token"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    (folder / "env").write_text(
        f"export RAY_ADDRESS={state.dashboard} RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={secret}\nunset RAY_AUTH_TOKEN\n"
    )
    (folder / "cluster.json").write_text(json.dumps(asdict(state), indent=1))


def read_folder(folder: Path) -> State | None:
    """Read the cluster of a folder; None if there is none.

    Raises:
        UsageError: the folder belongs to another user.
    """
    try:
        if folder.stat().st_uid != os.getuid():
            raise UsageError(f"--folder {folder} belongs to another user: give another one")
        return State(**json.loads((folder / "cluster.json").read_text()))
    except FileNotFoundError:
        return None


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The ports of a head, which were free when they were checked."""

    ray: int
    dashboard: int
    client: int

    @classmethod
    def checked(cls, ray: int, dashboard: int, client: int) -> "Ports":
        """Replace each 0 by a free port, and check the others.

        Raises:
            UsageError: a port is in use, or invalid.
        """
        taken = []
        with ExitStack() as stack:
            for option, port in (("port", ray), ("dashboard-port", dashboard), ("client-port", client)):
                try:
                    server = stack.enter_context(socket.create_server(("", port)))
                except (OSError, OverflowError) as error:
                    reason = getattr(error, "strerror", None) or str(error)
                    raise UsageError(
                        f"--{option} {port} cannot be used: {reason}; give another one, or 0 for any"
                    ) from None
                taken.append(server.getsockname()[1])
        return cls(ray=taken[0], dashboard=taken[1], client=taken[2])


def config_of(file: str) -> dict[str, Any]:
    """Read the configuration of a cluster.

    Raises:
        UsageError: the file cannot be read, or configures another kind of cluster.
    """
    import yaml

    try:
        config = yaml.safe_load(Path(file).expanduser().read_text())
    except OSError as error:
        raise UsageError(f"--file {file} cannot be read: {error.strerror}; give one like {STANDARD}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"--file {file} is not YAML: {' '.join(str(error).split())}") from None
    provider = config.get("provider", {}) if isinstance(config, dict) else {}
    if not str(provider.get("module", "")).endswith(".FakeMultiNodeProvider") or "head_node_id" not in provider:
        raise UsageError(f"--file {file} is for several machines, unlike {STANDARD}: start it with ray up")
    assert isinstance(config, dict)
    if config.get("head_node_type") not in config.get("available_node_types", {}):
        raise UsageError(f"--file {file}: head_node_type must be one of available_node_types")
    return config


def ray_start(options: Sequence[str]) -> list[str]:
    """Return the command line that starts a node of Ray and stays in the foreground."""
    return [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *options]


def head_options(ports: Ports, *, dashboard_host: str, temp_dir: Path) -> list[str]:
    """Return the options of `ray start` for a head with a dashboard."""
    options = ["--head", f"--port={ports.ray}", f"--temp-dir={temp_dir}", "--include-dashboard=true"]
    options += [f"--dashboard-host={dashboard_host}", f"--dashboard-port={ports.dashboard}"]
    return [*options, f"--ray-client-server-port={ports.client}"]


def start(folder: Path, cluster: State, ports: Ports, config: dict[str, Any], *, timeout: float) -> None:
    """Start the head, and wait until it accepts jobs.

    Raises:
        UsageError: the head ended, or does not answer within `timeout` seconds; the message has the end of its log.
    """
    provider = config["provider"] | {"gcs_address": cluster.head, "module": PROVIDER}
    (folder / "config.yaml").write_text(json.dumps(config | {"provider": provider}, indent=1))  # JSON is YAML
    kind = config["head_node_type"]
    resources = config["available_node_types"][kind]["resources"]
    options = head_options(ports, dashboard_host="127.0.0.1", temp_dir=folder / "ray")
    options += [f"--num-cpus={resources.get('CPU', 0)}", f"--num-gpus={resources.get('GPU', 0)}"]
    options += [f"--node-ip-address={cluster.head.rpartition(':')[0]}", "--dashboard-agent-listen-port=0"]
    options += [f"--autoscaling-config={folder / 'config.yaml'}"]
    inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    settings = {
        MARK: cluster.mark,
        "PATH": f"{Path(sys.executable).parent}:{inherited.get('PATH', os.defpath)}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_NODE_TYPE_NAME": kind,
        "RAY_CLOUD_INSTANCE_ID": provider["head_node_id"],
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        "RAY_worker_niceness": inherited.get("RAY_worker_niceness", "0"),  # as for a Ray of our own
        **HEAD_ENVIRONMENT,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
    }
    log, env = folder / "head.log", inherited | settings
    with log.open("wb") as out:
        process = subprocess.Popen(
            ray_start(options), env=env, stdin=DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
        )
    deadline = time.monotonic() + timeout
    while True:
        ended = process.poll()
        if ended is not None or time.monotonic() > deadline:
            what = f"ended with {ended}" if ended is not None else f"does not answer within {timeout:g} s"
            raise UsageError(f"the head {what}; the end of its log, {log}:\n{log_tail(log)}")
        with suppress(OSError):
            _get(f"{cluster.dashboard}/api/jobs/", folder)
            if nodes(folder, cluster):
                return
        time.sleep(0.3)


def nodes(folder: Path, cluster: State) -> "list[dict[str, Json]]":
    """List the nodes that are alive, with id, head, cpus and gpus.

    Raises:
        OSError: the dashboard does not answer.
    """
    found = _get(f"{cluster.dashboard}/api/v0/nodes?limit=1000", folder)["data"]["result"]["result"]
    return [
        {
            "id": node["node_id"],
            "head": node["is_head_node"],
            "cpus": node["resources_total"].get("CPU", 0),
            "gpus": node["resources_total"].get("GPU", 0),
        }
        for node in found
        if node["state"] == "ALIVE"
    ]


def _get(url: str, folder: Path) -> "Json":
    token = (folder / "token").read_text().strip()
    request = Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urlopen(request, timeout=10) as reply:
            return json.load(reply)
    except (URLError, ValueError) as error:
        raise OSError(f"{url}: {error}") from error
