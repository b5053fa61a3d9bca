"""A real Ray gives workers the processes that the driver has started for them."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from raydali.launch.driver.placement import Placement
from raydali.launch.driver.process_servers import start_processes
from tests.support.cluster import descendants, environment, name_of, nodes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]
VARIABLES = {"A_VARIABLE": "of the workers"}


def test_a_worker_gets_the_process_that_was_started_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def idle() -> set[int]:
        return {each for each in descendants(os.getpid()) if name_of(each).startswith("ray::IDLE")}

    with nodes(environment(tmp_path), tmp_path / "ray", ["2"]) as (using, _):
        import ray

        monkeypatch.setenv("RAY_AUTH_MODE", using["RAY_AUTH_MODE"])
        ray.init(using["RAY_ADDRESS"], log_to_driver=False)
        try:
            before, deadline = idle(), time.monotonic() + 60
            start_processes(Placement(1, 1, cpus=1, gpu=False, reachable=1), VARIABLES)
            while not (started := idle() - before):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            worker: Any = ray.remote(num_cpus=1, runtime_env={"env_vars": VARIABLES})(lambda: os.getpid())
            assert ray.get(worker.remote()) in started
        finally:
            ray.shutdown()
