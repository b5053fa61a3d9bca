"""Process servers: what their forks have, and that no process waits for one that is dead."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from raydali.launch import fork_server
from tests.support.cluster import descendants, kill

ROOT = Path(__file__).parents[2]
LISTEN = """
import os
import signal
import sys
from raydali.launch import fork_server

try:
    listening = fork_server._listen(sys.argv[1])
except OSError:
    print("another one does", flush=True)
else:
    if not os.fork():
        listening.close()
        signal.pause()
    print("listens", flush=True)
    signal.pause()
"""
SERVE = """
import sys
from raydali.launch import fork_server

fork_server.MODULES = ()
fork_server._has_gpu = lambda: bool(sys.argv[2:])
fork_server.main(sys.argv[1])
"""
"""A server without what takes seconds to import. It is of a node with a GPU if it is given another argument."""


@contextmanager
def serving(path: str, *gpu: str, **options: Any) -> Iterator[int]:
    """A server that listens at a path; yield its process id."""
    with subprocess.Popen([sys.executable, "-c", SERVE, path, *gpu], **options) as server:
        try:
            with socket.socket(socket.AF_UNIX) as listens:
                while listens.connect_ex(path):
                    assert server.poll() is None
            yield server.pid
        finally:
            server.kill()


def ran(*command: str, **variables: str) -> list[str]:
    """Return the words that a program of Python prints."""
    env = os.environ | variables
    return subprocess.run(
        [sys.executable, *command], env=env, capture_output=True, text=True, check=True
    ).stdout.split()


def test_a_program_runs_without_a_fork_if_the_server_dies(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print('ran with', *sys.argv[1:])")
    command = [sys.executable, fork_server.__file__, str(tmp_path / "socket"), str(tmp_path / "program.py"), "me"]
    # The first process is the server, which imports for seconds, and its fork asks it.
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not descendants(server.pid):
        assert server.poll() is None
    later = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while Path("/proc/net/unix").read_text().count(command[2]) < 3:  # it listens, and both are connected
        assert server.poll() is None
    os.kill(server.pid, signal.SIGKILL)
    assert server.communicate()[0] == later.communicate()[0] == "ran with me\n"


def test_of_processes_that_start_at_once_one_replaces_a_server_that_was_killed(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with ExitStack() as stack:
        for _ in range(2):
            processes = []
            for _ in range(4):
                process = subprocess.Popen([sys.executable, "-c", LISTEN, path], stdout=subprocess.PIPE, text=True)
                processes.append(stack.enter_context(process))
                stack.callback(process.kill)
            (server,) = (each for each in processes if each.stdout and each.stdout.readline() == "listens\n")
            stack.callback(kill, descendants(server.pid))
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(path)
            server.kill()  # its fork stays
            server.wait()


def test_a_server_outlives_processes_that_it_cannot_fork_for(tmp_path: Path) -> None:
    path, program = str(tmp_path / "socket"), tmp_path / "program.py"
    program.write_text("import os; print(os.getppid())")
    with serving(path) as server:
        request = json.dumps([[str(program)], str(tmp_path / "gone"), dict(os.environ)])
        with socket.socket(socket.AF_UNIX) as asking:
            asking.connect(path)
            socket.send_fds(asking, [b" "], [0, 1, 2])
            asking.sendall(request.encode() + b"\n")
            assert asking.recv(1) == b""
        assert ran(fork_server.__file__, path, str(program)) == [str(server)]


@pytest.mark.slow
def test_where_there_is_a_gpu_forks_have_the_compiler_and_cuda_is_unused(tmp_path: Path) -> None:
    path, program = str(tmp_path / "socket"), tmp_path / "program.py"
    hashed = "from torch._inductor.runtime.triton_compat import triton_key; print(triton_key.cache_info().currsize)"
    program.write_text(
        f"import os, sys; print(*(each in sys.modules for each in sys.argv[1:]), os.getppid()); {hashed}"
    )
    compiler = [*fork_server.COMPILER_MODULES]
    with serving(path, "gpu") as server:
        found = ran(fork_server.__file__, path, str(program), *compiler, "nvidia.dali")
    assert found == [*["True"] * len(compiler), "False", str(server), "1"]


def test_a_fork_has_the_folders_of_modules_of_the_process_that_asks(tmp_path: Path) -> None:
    path, program = str(tmp_path / "socket"), tmp_path / "program.py"
    program.write_text("import sys; print(*sys.path[:2])")
    with serving(path, env=os.environ | {"PYTHONPATH": f"{ROOT}:/old"}):
        for python_path in (str(ROOT), f"/new:{ROOT}"):
            found = ran(fork_server.__file__, path, str(program), PYTHONPATH=python_path)
            assert found == [str(tmp_path), python_path.partition(":")[0]]


def test_processes_of_a_ray_of_our_own_are_forks_if_they_have_its_environment(tmp_path: Path) -> None:
    path, program, command = str(tmp_path / "socket"), tmp_path / "program.py", fork_server.__file__
    program.write_text("import os, sys; print(os.getppid(), os.environ['FOLDER'], *sys.argv[1:])")
    (tmp_path / "setup_worker.py").write_text("import sys; print('of Ray', *sys.argv[1:])")
    described, own = "--serialized-runtime-env-context=", {fork_server.OWN_SERVER: path}
    with serving(path) as server:
        context = {"command_prefix": [], "env_vars": {"FOLDER": "${HOME}/x"}, "py_executable": sys.executable}
        arguments = described + json.dumps(context), "--language=PYTHON", "--id=1"
        found = ran(command, str(program), *arguments, HOME="/h", **own)
        assert found == [str(server), "/h/x", "--id=1"]
    for other in ({"py_executable": "python"}, {"command_prefix": ["x"]}):
        given = [described + json.dumps(other), "--id=1"]
        assert ran(command, str(program), *given, **own) == f"of Ray {program} {' '.join(given)}".split()


def test_jobs_with_other_packages_or_settings_do_not_share_the_server_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "packages/torch").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", "")
    shared = fork_server._identity("same")
    assert fork_server._identity("other") != shared
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "job"))
    assert fork_server._identity("same") == shared
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    with_torch = fork_server._identity("same")
    assert with_torch != shared
    (tmp_path / "packages/__pycache__").mkdir()
    assert fork_server._identity("same") == with_torch
    (tmp_path / "packages/torch-2.dist-info").mkdir()
    installed = fork_server._identity("same")
    assert fork_server._identity("same") == installed != with_torch
    os.utime(tmp_path / "packages/torch-2.dist-info", (1, 1))  # the same version is installed again
    assert fork_server._identity("same") not in (installed, with_torch)
    (tmp_path / "packages/torchvision").mkdir()
    assert fork_server._identity("same") != with_torch
