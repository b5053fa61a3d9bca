"""Runs a command, then prints the CPU time of every process that it started, with the wall time beside it.

Processes that outlive their parent, as Ray's do, are adopted by this one and are counted too.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
MAX_ORPHAN_SECONDS = 20


def main(command: list[str]) -> int:
    """The command's exit status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl+C reaches the command too, which ends by itself
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = wait_for(process.pid)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(f"{seconds:.0f} CPU-seconds in {time.monotonic() - began:.0f} s")
    return code if code >= 0 else 128 - code


def wait_for(command: int) -> int:
    """Wait until the process `command` has ended, and for its orphans as long as they end soon; returns its status."""
    while True:
        pid, status = os.wait()
        if pid == command:
            break
    deadline = time.monotonic() + MAX_ORPHAN_SECONDS
    with contextlib.suppress(ChildProcessError):  # none is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
