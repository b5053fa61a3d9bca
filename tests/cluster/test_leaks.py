"""What a machine is left with: found by what really listens, and by what really lies in shared memory."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.support.chaos import leaks
from tests.support.chaos.virtual_hosts import LOCAL, Host

LISTENER = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"


@pytest.fixture
def listener() -> Iterator[tuple[psutil.Process, int]]:
    process = subprocess.Popen([sys.executable, "-c", LISTENER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    yield psutil.Process(process.pid), int(process.stdout.readline())
    process.kill()
    process.communicate()


def test_ports_are_those_of_the_processes_asked_about(listener: tuple[psutil.Process, int]) -> None:
    process, port = listener
    with socket.create_server((LOCAL, 0)) as other:
        assert leaks.ports_of([[process]]) == {port}
        assert {port, other.getsockname()[1]} <= Host("here", LOCAL).listening()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert leaks.ports_of([[process]]) == set() and port not in Host("here", LOCAL).listening()


@pytest.mark.skipif(not leaks.SHARED_MEMORY.is_dir(), reason="no /dev/shm")
def test_shared_memory_counts_once_nobody_uses_it() -> None:
    file = leaks.SHARED_MEMORY / f"raydali-test-{os.getpid()}"
    try:
        with file.open("wb"):
            assert file.name not in leaks.shared_memory()
        assert file.name in leaks.shared_memory()
    finally:
        file.unlink()
