"""Let Ray's processes be forks that need not import, see `launch.worker.process_server`: a server on each node.

Those of the workers are started before Ray Train asks for them.
"""

import hashlib
import json
import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL

from raydali.launch.driver.autoscaler import fitting
from raydali.launch.driver.placement import Placement
from raydali.launch.worker import process_server

SETUP_WORKER = str(Path(process_server.__file__).with_name("setup_worker.py"))
"""The program with which a Ray of our own starts its processes."""
COMPATIBLE = {"env_vars", "working_dir", "py_modules", "excludes", "config"}
"""Parts of a job's runtime environment that leave the choice of Python to Ray."""
LEASE_SECONDS = 0.05
"""How long Ray takes to begin a process for a task. The task must not run: it would hold the process for a while."""
PYTHON_OF_RAYLET = r"tr '\0' '\n' </proc/$PPID/cmdline | sed -n 's/^--python_worker_command=\([^ ]*\) .*/\1/p'"


@contextmanager
def own_server(folder: str) -> Iterator[dict[str, str]]:
    """Start the server of a Ray of our own before it, and end it; yield the runtime environment of its processes.

    Args:
        folder: of that Ray's files.
    """
    if sys.platform != "linux":
        yield {}
        return
    command = [sys.executable, process_server.__file__, f"{folder}/processes"]
    server = subprocess.Popen(command, start_new_session=True, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL)
    try:
        yield {"py_executable": shlex.join(command)}
    finally:
        server.kill()
        server.wait()


def servers_of_job() -> tuple[dict[str, str], str]:
    """Return a runtime environment in which the processes of this job on each node are forks of a server of their own.

    Also return the path of the servers, see `process_server.main`.

    Servers are forks of the node's, which jobs with other environment variables do not share, since modules read some.

    A node that lacks this file, or a job that has a Python of its own, starts its processes as without servers.
    """
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")).get("runtime_env") or {}
    if sys.platform != "linux" or any(name not in COMPATIBLE and not name.startswith("_") for name in job):
        return {}, ""
    file = shlex.quote(process_server.__file__)
    shared = hashlib.sha256(json.dumps(job.get("env_vars"), sort_keys=True).encode()).hexdigest()[:8]
    path = f"-{secrets.token_hex(4)}-{shared}"
    python = f"p=$({PYTHON_OF_RAYLET}); p=${{p:-{shlex.quote(sys.executable)}}}"
    return {"py_executable": f"$({python}; [ -f {file} ] && echo $p {file} {path} || echo $p)"}, path


def start_servers(path: str, most: int | None) -> None:
    """Let nodes start the servers of this job now, all at the same time: the driver's, and those with CPUs.

    On the driver's node, the server that stays is asked directly, if there is one. Elsewhere, a task of Ray starts one.

    Args:
        path: of the servers, see `servers_of_job`.
        most: the largest number of workers. If more nodes have CPUs, only the driver's node starts one. None: as many
            workers as the cluster has room for.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = {node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")}
    if most is not None and len(nodes) > most:
        nodes = set()
    context = ray.get_runtime_context()
    nodes.add(own := context.get_node_id())
    joined = ray._private.worker.global_worker.node
    with suppress(OSError):
        if joined is not None:
            process_server.start_server(joined.raylet_socket_name, path, context.get_job_id())
            nodes.remove(own)
    for node in nodes:
        here = NodeAffinitySchedulingStrategy(node, soft=True)
        ray.remote(lambda: None).options(num_cpus=0, scheduling_strategy=here).remote()


def start_processes(placement: Placement, variables: Mapping[str, str]) -> None:
    """Let Ray start the processes of the workers now, while that of the trainer starts, which then asks for them.

    Ray starts them for tasks with the environment of the workers, also if these are cancelled meanwhile, and gives a
    process to who needs one with the same environment.

    Args:
        placement: of a fixed number of workers.
        variables: environment variables of the workers.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    places: list[str] = []
    for node in ray.nodes():
        has = node["Resources"] if node["Alive"] else {}
        fit = fitting(has.get("CPU", 0.0), has.get("GPU", 0.0), placement.cpus, placement.gpu)
        places += [node["NodeID"]] * fit
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": dict(variables)})(lambda: None)
    here = [NodeAffinitySchedulingStrategy(node, soft=True) for node in places[: placement.minimum]]
    tasks = [task.options(scheduling_strategy=each).remote() for each in here]
    time.sleep(LEASE_SECONDS)
    for each in tasks:
        ray.cancel(each)
