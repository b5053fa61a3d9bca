"""Runs a command, then prints the CPU time of every process that it started, with the wall time beside it.

Processes that outlive their parent, as Ray's do, are adopted by this one and are counted too.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """The command's exit status."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    began = time.monotonic()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl+C reaches the command too, which ends by itself
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    ended = -1
    while ended != process.pid:
        ended, status = os.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = used.ru_utime + used.ru_stime
    print(f"{seconds:.0f} CPU-seconds in {time.monotonic() - began:.0f} s")
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
