"""What dies beside the driver, or in it: the run has an end, and one sentence says that the same command resumes it."""

import os
import signal
from pathlib import Path
from subprocess import Popen

import pytest

from raydali.run.folder import REPORT, RunFolder
from tests.support.cluster import descendants, name_of, wait_until_gone
from tests.support.messages import mentions
from tests.support.watched_job import events, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def assert_ended(process: "Popen[bytes]", folder: RunFolder, log: Path, said: str) -> None:
    assert process.wait(120) == 1
    *_, last = log.read_text().splitlines()
    assert "Traceback" not in log.read_text()
    assert mentions(last, f"error: {said} --name run resumes")
    (stop,) = events(folder, "stop")
    assert last == f"error: {stop['error']}"
    assert "Under way" not in folder.read(REPORT).decode()


@pytest.mark.parametrize(
    ("victim", "said"),
    [("ray::_ChannelActor", "ActorDiedError"), ("raylet/raylet", "raylet -9"), ("gcs/gcs_server", "gcs_server -9")],
)
def test_a_run_whose_driver_loses_ray_has_an_end(victim: str, said: str, env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path) as (process, folder):
        below = descendants(process.pid)
        (pid,) = [each for each in below if victim in name_of(each).split(" ")[0]]
        os.kill(pid, signal.SIGKILL)
        assert_ended(process, folder, tmp_path / "log", said)
        assert wait_until_gone(below, 60) == []


def test_a_run_whose_driver_raises_an_unexpected_exception_has_an_end(env: dict[str, str], tmp_path: Path) -> None:
    script, reached = tmp_path / "failing.py", tmp_path / "reached"
    script.write_text(
        "import os\nimport jobs.imagenet as job\n"
        "from raydali.launch.driver.command import run_job\n"
        "from raydali.launch.driver.group_size import Waiting\n"
        "def poll(waiting):\n"
        f"    if os.path.exists('{reached}'):\n"
        "        {}['planted']\n"
        "Waiting.poll = poll\n"
        "run_job(job.JOB)\n"
    )
    with running(env, tmp_path, script=str(script)) as (process, folder):
        reached.touch()
        assert_ended(process, folder, tmp_path / "log", "KeyError 'planted'")
