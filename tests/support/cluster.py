"""Jobs as a user starts them, a cluster to submit them to, and what is left of both afterwards."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from raydali.run.find import newest_step
from raydali.run.folder import RunFolder

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))
IMAGENET = "jobs/imagenet.py"


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a user with an empty home, and no Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_"))}
    cache = str(home.parent / "cache")
    return kept | {"HOME": str(home), "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)} | more


def command_line(process: psutil.Process) -> str:
    """The command line of a process, or an empty text if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline()).strip()
    return ""


def start_job(*arguments: str, env: dict[str, str], log: Path, script: str = IMAGENET) -> subprocess.Popen[bytes]:
    """`python jobs/imagenet.py ARGUMENTS`, or another script, its output in `log`."""
    command = [sys.executable, script, *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)


def run_job(
    *arguments: str, env: dict[str, str], log: Path, timeout: float = 600, script: str = IMAGENET
) -> tuple[int, str]:
    """The exit code and the output of a job."""
    process = start_job(*arguments, env=env, log=log, script=script)
    try:
        return process.wait(timeout), log.read_text()
    finally:
        process.kill()


def finished_run(storage: Path, name: str, *options: str, script: str = IMAGENET) -> RunFolder:
    """The folder of a run that a job has trained to its end, in the environment of the tests."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    arguments = ["--storage", str(storage), "--name", name, *options]
    code, output = run_job(*arguments, env=env, log=storage / f"{name}.log", timeout=380, script=script)
    assert code == 0, output
    return RunFolder(str(storage), name)


def descendants(pid: int) -> list[int]:
    """Processes below a process, by Linux's /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            children.setdefault(parent, []).append(int(entry.name))
    below = list(children.get(pid, []))
    for child in below:
        below += children.get(child, [])
    return below


def name_of(pid: int) -> str:
    """A process's command line, empty once it is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until_gone(pids: list[int], timeout: float = 240) -> list[str]:
    """What of these processes is still alive after at most `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (left := [name for pid in pids if (name := name_of(pid))]) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def kill(pids: list[int]) -> None:
    """SIGKILL, whether they are still there or not."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def committed(folder: RunFolder) -> int:
    """Steps that the newest whole checkpoint covers; 0 where there is none."""
    return newest_step(folder) or 0


@contextmanager
def head(env: dict[str, str], log: Path) -> Iterator[str]:
    """A cluster of one node with two CPUs, in this environment; the address of its dashboard.

    What its jobs call `python` is the one that runs this; raydali comes with their working directory.
    """
    temp_dir, (port, dashboard, agent, client) = f"/tmp/rd-{os.getpid()}", free_ports(4)
    command = [RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={port}", f"--temp-dir={temp_dir}"]
    command += ["--include-dashboard=true", f"--dashboard-port={dashboard}", "--disable-usage-stats"]
    command += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
    env = env | {"PATH": f"{Path(RAY).parent}:{env['PATH']}", "PYTHONPATH": ""}
    env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "0"  # else it would wait 30 s for the actor that keeps Train's state
    address = f"http://127.0.0.1:{dashboard}"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output)
    try:
        deadline, listing = time.monotonic() + 600, [RAY, "job", "list"]
        while subprocess.run(listing, env=env | {"RAY_ADDRESS": address}, capture_output=True, timeout=300).returncode:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(1)
        yield address
    finally:
        below = [process.pid, *descendants(process.pid)]
        process.terminate()
        process.wait(240)
        wait_until_gone(below, timeout=3)
        kill(below)
        shutil.rmtree(temp_dir)


@contextmanager
def nodes(env: dict[str, str], log: Path, *starts: Sequence[str]) -> Iterator[tuple[dict[str, str], list[str]]]:
    """A cluster of a head without CPUs and these nodes: the environment of its drivers, and the nodes' ids in order.

    Each of `starts` is what precedes a node's options, `env A=1` for instance; its last word is the number of CPUs.
    """
    port, client = free_ports(2)
    folder = f"/tmp/rdf-{os.getpid()}"
    env = env | {"RAY_AUTH_MODE": "disabled", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    using = env | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    common = ["--block", "--disable-usage-stats", "--object-store-memory=100000000"]
    head = [f"--port={port}", f"--ray-client-server-port={client}", f"--temp-dir={folder}", "--include-dashboard=false"]
    ports = ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
    commands = [[RAY, "start", "--head", *common, *head, *ports, "--num-cpus=0"]]
    for *before, cpus in starts:
        commands.append([*before, RAY, "start", f"--address=127.0.0.1:{port}", *common, *ports, f"--num-cpus={cpus}"])
    processes: list[subprocess.Popen[bytes]] = []
    ids: list[str] = []
    try:
        for command in commands:
            with log.open("ab") as output:
                processes.append(subprocess.Popen(command, env=env, stdout=output, stderr=output))
            ids += joined(len(processes), using, ids)
        yield using, ids[1:]
    finally:
        below = [pid for process in processes for pid in (process.pid, *descendants(process.pid))]
        for process in processes:
            process.terminate()
        wait_until_gone(below, timeout=5)
        kill(below)
        for process in processes:
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def joined(number: int, env: dict[str, str], known: Sequence[str] = ()) -> list[str]:
    """The ids of the cluster's nodes but those known, once it has so many."""
    deadline = time.monotonic() + 120
    while len(ids := alive(env)) < number:
        assert time.monotonic() < deadline, f"{len(ids)} of {number} nodes"
        time.sleep(0.5)
    return [each for each in ids if each not in known]


def alive(env: dict[str, str]) -> list[str]:
    """The ids of the nodes of the cluster that RAY_ADDRESS names."""
    ask = "import json, ray; ray.init(log_to_driver=False); "
    ask += "print(json.dumps([node['NodeID'] for node in ray.nodes() if node['Alive']]))"
    done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []


def free_ports(number: int) -> list[int]:
    """Ports that nobody listened at just now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]
