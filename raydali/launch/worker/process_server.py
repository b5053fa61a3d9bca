"""Fork Ray's processes from one that has imported what they use, so that none of them imports it again.

Ray starts a process by a command, the `py_executable` of its runtime environment, with a program and its arguments. If
this file is the command, the process asks the server of its job on this node to fork and run the program, with the
environment, folder and files of the process, and ends. Where any of this fails, Python runs the program as it would
without this file, which is run by its path since `raydali` may be missing.

    a Ray of our own     one server, which raydali starts before Ray
    another cluster      a server for each job, which is a fork of the node's: that one has imported other packages,
                         which takes most of the time, and serves later jobs, too. The first process that finds none
                         becomes it.
"""

import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

MODULES = (
    *("torch._dynamo", "torchvision.transforms.v2", "nvidia.dali.fn", "tyro"),
    *("pandas", "pyarrow.parquet", "pydantic.v1", "google.protobuf.json_format"),  # from here on, of Ray
    *("requests", "jsonschema", "fsspec", "yaml", "filelock"),
    *("pydantic.dataclasses", "rich.console", "click", "psutil"),
)
"""These modules of other packages take most of the time, and read nothing of a job's environment."""
JOB_MODULES: tuple[str, ...] = (
    "raydali.data.tasks.classification",
    "ray.tune",
    "ray.train.v2._internal.execution.worker_group.worker",
    "raydali.launch.trainer",
    "raydali.launch.worker.process_group",
    "raydali.launch.worker.ray_session",
    "raydali.launch.worker.training_run",
)
"""Imported with the environment of a process of Ray, since Ray reads it at import: the job, and the raylet's pid."""
JOB_ID, RAYLET_PID = "RAY_JOB_ID", "RAY_RAYLET_PID"
"""Variables that processes of Ray have."""
COMPILER_MODULES = "torch._inductor.compile_fx", "triton.experimental.gluon.language"
JOB_COMPILER_MODULES = ("raydali.train.fused.graph",)
"""Imported in addition on nodes with a GPU, since jobs compile by default only there: they take seconds."""
COMPILER_KEYS = ("torch._inductor.codecache", "torch_key"), ("torch._inductor.runtime.triton_compat", "triton_key")
"""Functions that hash all files of a compiler, once in each process: half a second."""
COUNTS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
CUDA_UNUSED = 3
"""`CUDA_ERROR_NOT_INITIALIZED`."""
ANSWER_SECONDS = 45.0
"""How long a process waits for the server; Ray gives it up after 60 s."""
IDLE_SECONDS, NODE_IDLE_SECONDS = 30.0, 600.0
"""How long the server of a job, or of a node, stays without a process that it has forked."""
_START_SECONDS = 10.0


def main(path: str, *program: str) -> None:
    """Run a program in a fork of the server of its job, or be that server.

    Args:
        path: of the server's socket. Without a folder, it follows the path of the raylet's socket, and ends with what
            jobs have in common that may share the server of a node.
        program: the path of a program of Python, and its arguments; none: be the server.
    """
    server, modules, idle_seconds = path, JOB_MODULES, IDLE_SECONDS
    if program and "/" not in path:
        raylet = next(each for each in program if each.startswith("--raylet-name=")).partition("=")[2]
        path, server = raylet + path, _of_node(raylet, path)
        modules, idle_seconds = (), NODE_IDLE_SECONDS
    listening, is_there = None, False
    if program:
        try:
            _ask(path, program)
            return
        except OSError as error:
            is_there = not isinstance(error, (FileNotFoundError, ConnectionRefusedError))  # but it has failed
    if not is_there:
        with suppress(OSError):  # another process is the server now, or none can be
            listening = _listen(server)
    if listening is not None and (not program or os.fork()):
        _serve(listening, server, modules, idle_seconds)
    elif program:
        if listening is not None:
            listening.close()  # held open here, it would not refuse this process once the server is dead
        if not is_there:
            with suppress(OSError):
                if server != path:
                    _ask(server, (__file__, path))
                _ask(path, program, wait=True)
                return
        os.execv(sys.executable, [sys.executable, *program])


def start_server(raylet: str, path: str, job: str) -> None:
    """Start the server of a job on this node, as a fork of the node's that has the environment of Ray's processes.

    Args:
        raylet: the path of the raylet's socket.
        path: see `main`.
        job: Ray's id of the job.

    Raises:
        OSError: the node has no server, or it does not answer at once, since it still imports.
    """
    with Path(os.devnull).open("r+") as none:
        _ask(_of_node(raylet, path), (__file__, raylet + path), {JOB_ID: job}, (none.fileno(),) * 3, seconds=1.0)


def _of_node(raylet: str, path: str) -> str:
    """Return the path of the socket of the server of a node, of which that of a job at this path is a fork."""
    return f"{raylet}-{_identity(path.rpartition('-')[2])}"


def _python_path() -> list[str]:
    return [each for each in os.environ.get("PYTHONPATH", "").split(":") if each]


def _identity(shared: str) -> str:
    """Return a name of the server of a node for jobs with these packages, this file, and what they share besides."""
    packages = sysconfig.get_path("purelib")
    names = {each.partition(".")[0] for each in MODULES}
    own = [path for path in _python_path() if any(Path(path, name).exists() for name in names)]
    # The time of the folder itself also changes when Python first writes bytecode there.
    found = [each for folder in (packages, *own) for each in Path(folder).iterdir() if each.name != "__pycache__"]
    installed = sorted((str(each), each.suffix == ".dist-info" and each.stat().st_mtime_ns) for each in found)
    facts = [shared, sys.executable, own, installed, Path(__file__).read_text()]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]


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


def _ask(
    path: str,
    program: tuple[str, ...],
    environment: Mapping[str, str] = os.environ,
    files: tuple[int, ...] = (0, 1, 2),
    *,
    wait: bool = False,
    seconds: float = ANSWER_SECONDS,
) -> None:
    """Ask the server at a path to fork and run a program.

    If the environment is not that of a process of Ray, it is added to that of the server.
    """
    until = time.monotonic() + _START_SECONDS * wait
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(seconds)
        while (error := server.connect_ex(path)) and time.monotonic() < until:
            time.sleep(0.01)
        if error:
            raise OSError(error, os.strerror(error))
        request = [program, str(Path.cwd()), {**environment}]
        socket.send_fds(server, [b" "], files)
        server.sendall(json.dumps(request).encode() + b"\n")
        if not server.recv(1):
            raise ConnectionError("the server has not forked")


def _serve(listening: socket.socket, path: str, modules: tuple[str, ...], idle_seconds: float) -> None:
    """Fork for whom asks, until this process's parent has ended or the server is idle. Forks run their programs.

    Args:
        listening: the socket.
        path: its path.
        modules: what to import besides MODULES before the first fork, in an environment of Ray: the first who asks has
            one if this process has none.
        idle_seconds: how long the server stays without a process that it has forked.
    """
    parent = os.getppid()
    sys.path[0] = str(Path(__file__).parents[3])  # the driver's raydali, not this file's folder
    has_gpu = _has_gpu()
    _import((*MODULES, *COMPILER_MODULES * has_gpu))
    for module, name in COMPILER_KEYS * has_gpu:
        with suppress(Exception):  # of another version
            getattr(importlib.import_module(module), name)()
    if modules:
        modules += JOB_COMPILER_MODULES * has_gpu
    if RAYLET_PID in os.environ:
        _import_ray(modules)
    listening.settimeout(1.0)
    until = time.monotonic() + idle_seconds
    while os.getppid() == parent and time.monotonic() < until and not _uses_cuda():
        program: tuple[str, ...] = ()
        with suppress(OSError, ValueError):  # a process that has ended has not asked to the end
            connection = listening.accept()[0]
            with connection:
                program = _fork(connection, modules)
        if program:
            listening.close()
            sys.argv[:], sys.path[0] = program, str(Path(program[0]).parent)
            runpy.run_path(program[0], run_name="__main__")
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            until = time.monotonic() + idle_seconds
    Path(path).unlink(missing_ok=True)


def _import(modules: tuple[str, ...]) -> None:
    before = os.environ.get(COUNTS_BY_NVML, "")
    os.environ[COUNTS_BY_NVML] = "1"  # or torch initialises CUDA to learn whether there is a GPU
    gc.disable()  # to look for garbage among modules takes a twelfth of the time
    for name in modules:
        with suppress(ModuleNotFoundError):  # after any other error, forks could not import it again
            importlib.import_module(name)
    os.environ[COUNTS_BY_NVML] = before  # torch takes no notice of an empty one
    gc.collect()
    gc.freeze()
    gc.enable()


def _has_gpu() -> bool:
    """Return whether the library is here that torch asks instead of CUDA."""
    with suppress(OSError):
        return ctypes.CDLL("libnvidia-ml.so.1") is not None
    return False


def _uses_cuda() -> bool:
    """Return whether this process has initialised CUDA, which its forks could then not use."""
    with suppress(OSError):
        return bool(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_UNUSED)
    return False


def _import_ray(modules: tuple[str, ...]) -> None:
    """Import what uses Ray, without a random id: once Ray has drawn one, all forks draw the same ones, which clash."""
    if not modules:
        return
    with suppress(ImportError):
        import ray.actor

        class OfSystem(ray.ActorClassID):
            @classmethod
            def from_random(cls) -> "OfSystem":
                return cls(os.urandom(cls.size()))

        vars(ray.actor)["ActorClassID"] = OfSystem  # a declared actor has one
    _import(modules)


def _fork(connection: socket.socket, modules: tuple[str, ...]) -> tuple[str, ...]:
    """Fork for a process that asks; return its program in the fork, and nothing in the server."""
    connection.settimeout(10.0)
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as request:
        program, folder, environment = json.loads(request.readline())
    before = _python_path()
    if RAYLET_PID in environment:
        os.environ.clear()
    os.environ.update(environment)
    if (now := _python_path()) != before:
        sys.path[1:] = [*now, *(each for each in sys.path[1:] if each not in before)]
    _import_ray(modules)
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
