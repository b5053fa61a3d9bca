"""Jobs as a user starts them, and what is left of them afterwards."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of a user with an empty home, and no Ray."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    cache = str(home.parent / "cache")
    return kept | {"HOME": str(home), "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT)} | more


def start_job(*arguments: str, env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """`python jobs/imagenet.py ARGUMENTS`, its output in `log`."""
    command = [sys.executable, "jobs/imagenet.py", *arguments]
    with log.open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT)


def run_job(*arguments: str, env: dict[str, str], log: Path, timeout: float = 240) -> tuple[int, str]:
    """The exit code and the output of a job."""
    process = start_job(*arguments, env=env, log=log)
    try:
        return process.wait(timeout), log.read_text()
    finally:
        process.kill()


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


def wait_until_gone(pids: list[int], timeout: float = 30) -> list[str]:
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
