"""What the driver does beside Ray Train's trainer, on a real Ray."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from raydali.launch.trainer import Training, _start_processes
from tests.support.cluster import descendants, environment, name_of, nodes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
VARIABLES = {"A_VARIABLE": "of the workers"}
TRAINING = Training(
    name="run",
    storage="",
    workers=1,
    replaces=0,
    gpu=False,
    cpus=1,
    timeout=timedelta(60),
    start_timeout=60,
    health_check_seconds=1,
    worker_variables=VARIABLES,
)


def test_a_worker_gets_the_process_that_was_started_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle() -> set[int]:
        return {each for each in descendants(os.getpid()) if name_of(each).startswith("ray::IDLE")}

    with nodes(environment(tmp_path), tmp_path / "ray", ["2"]) as (using, _):
        import ray

        monkeypatch.setenv("RAY_AUTH_MODE", using["RAY_AUTH_MODE"])
        ray.init(using["RAY_ADDRESS"], log_to_driver=False)
        try:
            before, deadline = idle(), time.monotonic() + 60
            _start_processes(1, TRAINING, VARIABLES)
            while not (started := idle() - before):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            worker: Any = ray.remote(num_cpus=1, runtime_env={"env_vars": VARIABLES})(lambda: os.getpid())
            assert ray.get(worker.remote()) in started
        finally:
            ray.shutdown()
