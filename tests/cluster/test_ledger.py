"""The ledger of a real run whose worker and whose driver are killed, against what was seen from outside."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from raydali.run.ledger import LEDGER, PARTS
from tests.support.cluster import committed, environment, run_job
from tests.support.watched_job import OPTIONS, events, running, trainers, wait_for


@pytest.mark.slow
def test_killed_worker_and_killed_driver(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    env = environment(tmp_path / "home")
    with running(env, tmp_path, "--price", "3.6") as (process, folder):
        began = psutil.Process(process.pid).create_time()
        os.kill(trainers(process.pid)[0], signal.SIGKILL)
        wait_for(lambda: len(events(folder, "resume")) == 1, process, tmp_path)
        beyond = committed(folder) + 40
        wait_for(lambda: committed(folder) >= beyond, process, tmp_path)
        process.kill()
        process.wait()
        died = time.time()
    open_at_death = folder.read_json(LEDGER)["groups"]
    assert len(open_at_death) == 2 and open_at_death[1]["released"] is None
    time.sleep(max(0.0, died + 10 - time.time()))
    again = time.time()
    options = [*OPTIONS, "--name", "run", "--storage", str(tmp_path), "--price", "3.6"]
    code, output = run_job(*options, env=env, log=tmp_path / "log")
    assert code == 0, output
    found = folder.read_json(LEDGER)
    held, seconds = found["worker_seconds"], found["seconds"]
    assert sum(held[part] for part in PARTS) == pytest.approx(held["held"], rel=0.01)
    # Workers do not outlive their driver, which gives a sign of life each half second.
    (finish,) = events(folder, "finish")
    with_driver = died - began + finish["time"] - again
    assert seconds["held"] + seconds["before_placement"] == pytest.approx(with_driver, rel=0.01, abs=1.5)
    assert seconds["without_driver"] == pytest.approx(again - died, abs=1.5)
    first, second, third = found["groups"]
    assert (first["restarts"], second["restarts"], third["restarts"]) == (False, True, False)
    assert (first["saved"], second["saved"], third["saved"]) == (False, False, True)
    failure, *_ = events(folder, "failure")
    assert first["released"] == pytest.approx(failure["time"], abs=1.0)
    assert second["released"] == pytest.approx(died, abs=1.5)
    assert held["again"] > 0 and held["restarting"] > 0 and held["open"] == 0
    assert held["rest"] < 0.1 * held["held"]
    assert found["cost_usd"] == pytest.approx(held["held"] / 1000, rel=1e-3)
    assert "steps done again" in output and "$" in output
    page = folder.read("report.html").decode()
    assert 'class="ledger"' in page and "steps done again" in page
