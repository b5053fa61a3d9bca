"""The processes of a cluster: found by mark, session and parent, and ended, whatever they do about it."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from raydali.host import cluster_processes
from tests.support.cluster import command_line

# The child has neither the mark nor the session, and ignores SIGTERM; its own child stays when it ends.
CHILD = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], env={}, start_new_session=True)
print(os.getpid(), flush=True)
time.sleep(600)
"""
HEAD = f"""
import subprocess, sys
subprocess.Popen([sys.executable, "-c", {CHILD!r}], env={{}}, start_new_session=True).wait()
"""


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    monkeypatch.setattr(cluster_processes, "GRACE_SECONDS", 0.5)
    mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
    environment = {**os.environ, cluster_processes.MARK: mark}
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD], env=environment, start_new_session=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield mark, process
    cluster_processes.end(mark)
    process.wait()


def test_members_are_found_by_mark_and_by_parent(head: tuple[str, subprocess.Popen[bytes]]) -> None:
    mark, process = head
    found = cluster_processes.members(mark)
    assert process.pid in {each.pid for each in found} and len(found) == 3
    deadline = time.monotonic() + 30  # the kernel shows an empty command line for a moment after exec
    while not any("sleep 600" in command_line(each) for each in found):
        assert time.monotonic() < deadline, [command_line(each) for each in found]
        time.sleep(0.01)
    assert cluster_processes.members("another") == []


def test_all_of_them_are_ended(head: tuple[str, subprocess.Popen[bytes]]) -> None:
    mark, process = head
    found = cluster_processes.members(mark)
    assert cluster_processes.end(mark) == []
    process.wait(60)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in found)
    assert [command_line(each) for each in found] == [""] * 3
