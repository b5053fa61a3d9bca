"""Fork Ray's processes from one that has imported what they use, so that none of them imports it again.

Ray starts a process by a command, the `py_executable` of its runtime environment, with a program and its arguments. If
this file is the command, the process asks the server of its node to fork and run the program, with the environment,
folder and files of the process, and ends. The first one that finds no server becomes the server. Where any of this
fails, Python runs the program as it would without this file, which is run by its path since `raydali` may be missing.
"""

import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

MODULES = ("torch._dynamo", "torchvision", "nvidia.dali.fn", "raydali.data.tasks.classification")
RAY_MODULES = (
    "ray.train.v2._internal.execution.worker_group.worker",
    "raydali.launch.controller.scaling",
    "raydali.launch.worker.ray_session",
    "raydali.launch.worker.training_run",
)
"""Imported with the environment of the first process, since Ray reads it at import: the job, and the raylet's pid."""
CUDA_UNUSED = 3
"""`CUDA_ERROR_NOT_INITIALIZED`."""
ANSWER_SECONDS = 45.0
"""How long a process waits for the server; Ray gives it up after 60 s."""
IDLE_SECONDS = 30.0
"""How long a server stays without a process that it has forked."""


def main(path: str, *program: str) -> None:
    """Run a program in a fork of the server, or become the server.

    Args:
        path: of the server's socket; without a folder, it is appended to the path of the raylet's.
        program: the path of a program of Python, and its arguments; none: only be the server.
    """
    if "/" not in path:
        path = next(each for each in program if each.startswith("--raylet-name=")).partition("=")[2] + path
    listening = None
    with suppress(OSError):  # there is a server, or none can be
        listening = _listen(path)
    if listening is not None and (not program or os.fork()):
        sys.path[0] = str(Path(__file__).parents[3])  # the driver's raydali, not this file's folder
        program = _serve(listening, path)
    else:
        if listening is not None:
            listening.close()  # held open here, it would not refuse this process once the server is dead
        with suppress(OSError):
            _ask(path, program)
            return
        os.execv(sys.executable, [sys.executable, *program])
    if program:
        sys.argv[:], sys.path[0] = program, str(Path(program[0]).parent)
        runpy.run_path(program[0], run_name="__main__")


def _listen(path: str) -> socket.socket:
    lock = os.open(f"{path}.lock", os.O_WRONLY | os.O_CREAT, 0o600)
    fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until this process ends; its forks do not have it
    Path(path).unlink(missing_ok=True)  # of a server that was killed
    listening = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)  # nobody else may ask
    try:
        listening.bind(path)
    finally:
        os.umask(before)
    listening.listen(128)
    return listening


def _ask(path: str, program: tuple[str, ...]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(ANSWER_SECONDS)
        server.connect(path)
        request = [program, str(Path.cwd()), {**os.environ}]
        socket.send_fds(server, [b" "], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")
        if not server.recv(1):
            raise ConnectionError("the server has not forked")


def _serve(listening: socket.socket, path: str) -> tuple[str, ...]:
    """Fork for whom asks, until this process's parent has ended or the server is idle; return a fork's program."""
    parent = os.getppid()
    _import(MODULES)
    listening.settimeout(1.0)
    until = time.monotonic() + IDLE_SECONDS
    while os.getppid() == parent and time.monotonic() < until and not _uses_cuda():
        with suppress(OSError, ValueError):  # a process that has ended has not asked to the end
            connection = listening.accept()[0]
            with connection:
                if program := _fork(connection):
                    listening.close()
                    return program
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            until = time.monotonic() + IDLE_SECONDS
    Path(path).unlink()
    return ()


def _import(modules: tuple[str, ...]) -> None:
    for name in modules:
        with suppress(ModuleNotFoundError):  # after any other error, forks could not import it again
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _uses_cuda() -> bool:
    """Return whether this process has initialised CUDA, which its forks could then not use."""
    with suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_UNUSED)
    return False


def _import_ray() -> None:
    """Import what uses Ray, without a random id: once Ray has drawn one, all forks draw the same ones, which clash."""
    with suppress(ImportError):
        import ray.actor

        class OfSystem(ray.ActorClassID):
            @classmethod
            def from_random(cls) -> "OfSystem":
                return cls(os.urandom(cls.size()))

        vars(ray.actor)["ActorClassID"] = OfSystem  # a declared actor has one
    _import(RAY_MODULES)


def _fork(connection: socket.socket) -> tuple[str, ...]:
    connection.settimeout(10.0)
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as request:
        program, folder, environment = json.loads(request.readline())
    os.environ.clear()
    os.environ.update(environment)
    _import_ray()
    is_fork = not os.fork()
    if is_fork:
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # others seed themselves
        try:
            os.setsid()
            os.chdir(folder)
            for number, file in enumerate(files):
                os.dup2(file, number)
            connection.sendall(b"1")
        except OSError:
            os._exit(0)  # the folder is gone, or the process has stopped waiting: it runs the program itself
    for file in files:
        os.close(file)
    return tuple(program) if is_fork else ()


if __name__ == "__main__":
    main(*sys.argv[1:])
