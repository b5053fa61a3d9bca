"""Fork Ray's processes from one that has imported other packages, so that none of them imports these again.

Ray starts a process by a command: a program of Python and its arguments. If this file is in front of them, the process
asks the server of its node to fork and run the program, with the environment, folder and files of the process, and
ends. Where any of this fails, Python runs the program as it would without this file, which is run by its path since
`raydali` may be missing.

    a Ray of our own     raydali starts the server before Ray
    another cluster      the first process that finds no server becomes it, and stays for later runs

The server imports neither Ray nor raydali, since Ray reads the environment of a job when it is imported.
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
from contextlib import suppress
from pathlib import Path

MODULES = (
    *("torch._dynamo", "torchvision.transforms.v2", "nvidia.dali.fn", "tyro"),
    *("pandas", "pyarrow.parquet", "pydantic.v1", "google.protobuf.json_format"),  # from here on, of Ray
    *("requests", "jsonschema", "fsspec", "yaml", "filelock"),
    *("pydantic.dataclasses", "rich.console", "click", "psutil"),
)
"""These modules take most of the time, and read nothing of a job's environment."""
COMPILER_MODULES = "torch._inductor.compile_fx", "triton.experimental.gluon.language"
"""Imported in addition on nodes with a GPU, since jobs compile by default only there: they take seconds."""
COMPILER_KEYS = ("torch._inductor.codecache", "torch_key"), ("torch._inductor.runtime.triton_compat", "triton_key")
"""Functions that hash all files of a compiler, once in each process: half a second."""
COUNTS_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
CUDA_UNUSED = 3
"""`CUDA_ERROR_NOT_INITIALIZED`."""
OWN_SERVER = "RAYDALI_PROCESS_SERVER"
"""The variable with the path of the server of a Ray of our own."""
CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="
"""Options with which a Ray of our own starts a process: a description of its environment, and Python."""
ANSWER_SECONDS = 45.0
"""How long a process waits for the server; Ray gives it up after 60 s."""
IDLE_SECONDS = 600.0
"""How long a server stays without a process that it has forked."""
_START_SECONDS = 10.0


def main(*arguments: str) -> None:
    """Run a program in a fork of the server of this node, or be that server.

    Args:
        arguments: the path of a socket: be the server there. Or what jobs have in common that may share a server, and
            the program of a process of Ray with its arguments. A Ray of our own only gives the latter.
    """
    if arguments[0].endswith(".py"):
        path, program = os.environ[OWN_SERVER], _set_up(arguments)
    else:
        path, *program = arguments
        raylet = [argument.partition("=")[2] for argument in program if argument.startswith("--raylet-name=")]
        if raylet:
            path = f"{raylet[0]}-{_identity(path)}"
    if not program:
        _serve(_listen(path), path)
        return
    for seconds in (0.0, _START_SECONDS):
        try:
            _ask(path, program, seconds)
            return
        except (FileNotFoundError, ConnectionRefusedError):
            try:
                listening = _listen(path)
            except OSError:  # another process is the server now, or none can be
                continue
        except OSError:  # the server has failed
            break
        if os.fork():
            _serve(listening, path)
            return
        listening.close()  # held open here, it would not refuse this process once the server is dead
    os.execv(sys.executable, [sys.executable, *program])


def _set_up(arguments: tuple[str, ...]) -> list[str]:
    """Take over the environment of a process of a Ray of our own, and return its program.

    Ray's own program for this imports Ray for a second. It runs in place of this process if the job has another runtime
    environment than the driver gives it.
    """
    described = next((argument.removeprefix(CONTEXT) for argument in arguments if argument.startswith(CONTEXT)), "{}")
    context = {name: value for name, value in json.loads(described).items() if value}
    python, variables = context.pop("py_executable", sys.executable), context.pop("env_vars", {})
    if context or python != sys.executable:
        of_ray = Path(arguments[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(of_ray), *arguments])
    for name, value in variables.items():
        os.environ[name] = os.path.expandvars(value)
    return [argument for argument in arguments if not argument.startswith((CONTEXT, LANGUAGE))]


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]


def _identity(shared: str) -> str:
    """Return a name of the server for jobs with these packages, this file, and what they have in common besides."""
    packages = sysconfig.get_path("purelib")
    names = {module.partition(".")[0] for module in MODULES}
    own = [path for path in _python_path() if any(Path(path, name).exists() for name in names)]
    # The time of the folder itself also changes when Python first writes bytecode there.
    entries = [entry for folder in (packages, *own) for entry in Path(folder).iterdir() if entry.name != "__pycache__"]
    installed = sorted((str(entry), entry.suffix == ".dist-info" and entry.stat().st_mtime_ns) for entry in entries)
    return _hash([shared, sys.executable, own, installed, Path(__file__).read_text()])


def _hash(facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]


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


def _ask(path: str, program: list[str], seconds: float) -> None:
    """Ask the server at a path, which listens within so many seconds, to fork and run a program."""
    until = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(ANSWER_SECONDS)
        while (error := server.connect_ex(path)) and time.monotonic() < until:
            time.sleep(0.01)
        if error:
            raise OSError(error, os.strerror(error))
        request = [program, str(Path.cwd()), {**os.environ}]
        socket.send_fds(server, [b" "], (0, 1, 2))
        server.sendall(json.dumps(request).encode() + b"\n")
        if not server.recv(1):
            raise ConnectionError("the server has not forked")


def _serve(listening: socket.socket, path: str) -> None:
    """Fork for processes that ask, until this process's parent has ended or the server is idle."""
    parent = os.getppid()
    del sys.path[0]  # this file's folder
    _import_modules()
    listening.settimeout(1.0)
    until = time.monotonic() + IDLE_SECONDS
    while os.getppid() == parent and time.monotonic() < until and not _uses_cuda():
        program: list[str] = []
        with suppress(OSError, ValueError):  # a process that has ended has not asked to the end
            connection = listening.accept()[0]
            with connection:
                program = _fork(connection)
        if program:
            listening.close()
            sys.argv[:] = program
            sys.path.insert(0, str(Path(program[0]).parent))
            runpy.run_path(program[0], run_name="__main__")
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            until = time.monotonic() + IDLE_SECONDS
    Path(path).unlink(missing_ok=True)


def _import_modules() -> None:
    has_gpu = _has_gpu()
    before = os.environ.get(COUNTS_BY_NVML, "")
    os.environ[COUNTS_BY_NVML] = "1"  # or torch initialises CUDA to learn whether there is a GPU
    gc.disable()  # to look for garbage among modules takes a twelfth of the time
    for name in (*MODULES, *COMPILER_MODULES * has_gpu):
        with suppress(ModuleNotFoundError):  # after any other error, forks could not import it again
            importlib.import_module(name)
    os.environ[COUNTS_BY_NVML] = before  # torch takes no notice of an empty one
    for module, name in COMPILER_KEYS * has_gpu:
        with suppress(Exception):  # of another version
            getattr(importlib.import_module(module), name)()
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


def _fork(connection: socket.socket) -> list[str]:
    """Fork for a process that asks; return its program in the fork, and nothing in the server."""
    connection.settimeout(10.0)
    _, files, *_ = socket.recv_fds(connection, 1, 3)
    with connection.makefile("rb") as request:
        program, folder, environment = json.loads(request.readline())
    is_fork = not os.fork()
    if is_fork:
        before = _python_path()
        os.environ.clear()
        os.environ.update(environment)
        if (now := _python_path()) != before:
            sys.path[:] = [*now, *(entry for entry in sys.path if entry not in before)]
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
    return list(program) if is_fork else []


if __name__ == "__main__":
    main(*sys.argv[1:])
