"""Runs functions in a child process, whose crash or endless call does not end this one.

It is a fresh interpreter, not a fork: it has no threads, no locks and no GPU of its parent, and does not import the
parent's main module. It ends with its parent.
"""

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from raydali.errors import DataError, RaydaliError

SECONDS = 120.0
"""How long a call may take. What takes longer never ends."""
_PRINTED_BYTES = 10_000
RUNNING: set[int] = set()
"""The ids of the children of this process that run."""

T = TypeVar("T")
R = TypeVar("R")


class ChildDiedError(DataError):
    """A child process ended in a call, or did not return from it.

    Attributes:
        signal: the number of the signal that ended it, or 0.
    """

    signal = 0


class Child:
    """A child process, started by the first call, and again by the first one after its death. One thread uses it.

    Args:
        name: what it is, in messages, such as "decoder".
        seconds: how long a call may take.
    """

    def __init__(self, name: str, seconds: float = SECONDS) -> None:
        self._name, self._seconds = name, seconds
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: Callable[..., R], *args: Any) -> R:
        """Return the result of a function of a module, called in the child process.

        Raises:
            ChildDiedError: the process ended, or did not return.
            Exception: the error that the function raised; a DataError with its text if it cannot be sent.
        """
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            _send(self._channel, *_packed((function.__module__, function.__qualname__, args)))
            if not self._channel.poll(self._seconds):
                self.close()
                raise ChildDiedError(f"the {self._name} did not end within {self._seconds:g} s")
            error, result = _received(self._channel)
        except (EOFError, ConnectionError) as lost:
            code = self._process.wait()
            self.close()
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            died = ChildDiedError(f"the {self._name}'s process has ended ({cause})")
            died.signal = max(0, -code)
            raise died from lost
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _start(self) -> None:
        here, there = socket.socketpair()
        code = f"from raydali.host.child import serve; serve({there.fileno()})"
        path = os.pathsep.join(str(Path(folder).absolute()) for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        there.close()
        RUNNING.add(self._process.pid)
        self._channel = Connection(here.detach())

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._channel.close()
            self._process.kill()
            self._process.wait()
            RUNNING.discard(self._process.pid)
            self._process = None


class Children:
    """Child processes for one function after another on many items, as many as have work at the same time.

    Args:
        most: the largest number of processes.
        name: see `Child`.
        seconds: how long a call may take.
    """

    def __init__(self, most: int, name: str, seconds: float = SECONDS) -> None:
        self._name, self._seconds = name, seconds
        self._threads, self._local = ThreadPoolExecutor(max(1, most)), threading.local()
        self._all: list[Child] = []
        owner = os.getpid()
        # The exit of a process that was interrupted waits for these threads, before it calls functions of `atexit`.
        threading._register_atexit(lambda: self.close() if os.getpid() == owner else None)  # type: ignore[attr-defined]

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> list[R | Exception]:
        """Return the result of the function for each item, in order, or the error of `Child.call`."""
        return [*self._threads.map(lambda item: self._call(function, item), items)]

    def submit(self, function: Callable[[T], R], item: T) -> "Future[R | Exception]":
        """Return the future of what `map` returns for an item."""
        return self._threads.submit(self._call, function, item)

    def _call(self, function: Callable[[T], R], item: T) -> R | Exception:
        child: Child | None = getattr(self._local, "child", None)
        if child is None:
            child = self._local.child = Child(self._name, self._seconds)
            self._all.append(child)
        try:
            return child.call(function, item)
        except Exception as error:
            return error

    def close(self, function: Callable[..., Any] | None = None, *args: Any) -> None:
        """End all processes: at once, or when they have done what is under way, and have called a function."""
        self._threads.shutdown(wait=function is not None, cancel_futures=True)
        while any(thread.is_alive() for thread in self._threads._threads):  # again, since one may be starting
            for process in [child._process for child in self._all]:
                if process is not None:
                    process.kill()
            time.sleep(0.01)
        for child in self._all:
            if function is not None:
                with suppress(Exception):
                    child.call(function, *args)
            child.close()
        self._all.clear()


# What goes from one process to the other: an object, and then its buffers, which are not copied.


def _packed(message: object) -> tuple[bytes, list[memoryview]]:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return data, [buffer.raw() for buffer in buffers]


def _send(channel: Connection, data: bytes, buffers: list[memoryview]) -> None:
    channel.send_bytes(pickle.dumps((data, [*map(len, buffers)])))
    for buffer in buffers:
        while buffer:
            buffer = buffer[os.write(channel.fileno(), buffer) :]


def received(connection: socket.socket, length: int) -> memoryview:
    """Return so many bytes.

    Raises:
        ConnectionError: the connection ended before.
    """
    import numpy as np

    content = view = np.empty(length, np.uint8).data  # unlike a bytearray, it is not filled with zeros
    while view:  # all at once: no other thread needs to wait for this one in between
        if not (count := connection.recv_into(view, 0, socket.MSG_WAITALL)):
            raise ConnectionError("the connection ended")
        view = view[count:]
    return content


def _received(channel: Connection) -> tuple[Any, ...]:
    data, sizes = pickle.loads(channel.recv_bytes())
    if not sizes:
        return pickle.loads(data)  # type: ignore[no-any-return]
    with socket.socket(fileno=os.dup(channel.fileno())) as connection:
        content = received(connection, sum(sizes))
    ends = [*accumulate(sizes)]
    parts = [content[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return pickle.loads(data, buffers=parts)  # type: ignore[no-any-return]


# Code of the child process.


def serve(handle: int) -> None:
    """Call what the parent asks for, until it closes the channel."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent process ends this one
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(handle,), daemon=True).start()
    channel = Connection(handle)
    with tempfile.TemporaryFile() as output:  # what decoders print must not reach the user's terminal
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    while True:
        take_output()
        try:
            module, name, args = _received(channel)
        except (EOFError, ConnectionError):
            return
        try:
            answer = _packed((None, getattr(import_module(module), name)(*args)))
        except Exception as error:
            if not isinstance(error, RaydaliError):  # whose message is sufficient
                error.add_note(traceback.format_exc())
            answer = _packed((_sendable(error), None))
        with suppress(ConnectionError):
            _send(channel, *answer)


def _end_with_parent(handle: int) -> None:
    """End this process when its parent has ended, in the midst of a call, too."""
    end = select.poll()
    end.register(handle, select.POLLRDHUP)
    end.poll()
    os._exit(1)


def _sendable(error: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DataError(str(error) or type(error).__name__)
    return error


def take_output() -> str:
    """Return what this process, a child, wrote to its standard output and error since it was last asked."""
    length = os.lseek(2, 0, os.SEEK_END)
    text = os.pread(2, min(length, _PRINTED_BYTES), 0)
    os.ftruncate(2, 0)
    os.lseek(2, 0, os.SEEK_SET)
    return text.decode(errors="replace")
