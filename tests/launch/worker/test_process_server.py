"""What forks of one process share, and what they do not."""

import subprocess
import sys

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
