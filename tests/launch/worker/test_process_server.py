"""Forks of the process server do not share random ids, and none waits for a server that is dead."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from raydali.launch.worker import process_server
from tests.support.cluster import descendants

PROGRAM = """
import os
from raydali.launch.worker import process_server

process_server._import_ray()
import ray
from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker  # an actor

for _ in range(2):
    if not os.fork():
        print(ray.ObjectID.from_random().hex(), flush=True)
        os._exit(0)
    os.wait()
"""


def test_forks_draw_random_ids_of_their_own() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first != second


def test_a_program_runs_without_a_fork_if_the_server_dies(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print('ran with', *sys.argv[1:])")
    command = [sys.executable, process_server.__file__, str(tmp_path / "socket"), str(tmp_path / "program.py"), "me"]
    # The first process is the server, which imports for seconds, and its fork asks it.
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    while not descendants(server.pid):
        assert server.poll() is None
    later = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    os.kill(server.pid, signal.SIGKILL)
    assert server.communicate()[0] == later.communicate()[0] == "ran with me\n"
