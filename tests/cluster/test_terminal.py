"""A run whose terminal ends: it goes on without output, or leaves on SIGHUP as on other signals."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from raydali.run.folder import REPORT, RunFolder
from tests.support.cluster import IMAGENET, ROOT, committed, descendants, kill
from tests.support.watched_job import OPTIONS, events, wait_for

pytestmark = pytest.mark.slow


def test_a_run_goes_on_without_the_reader_of_its_output(env: dict[str, str], tmp_path: Path) -> None:
    """Standard error is closed, too."""
    command = f"exec {sys.executable} {IMAGENET} --epochs 2 --no-ceiling --name run --storage {tmp_path} 2>&-"
    process = subprocess.Popen(command, shell=True, cwd=ROOT, env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline()
    process.stdout.close()
    assert process.wait(600) == 0
    folder = RunFolder(str(tmp_path), "run")
    assert len(folder.rows("epochs.jsonl")) == 2 and len(events(folder, "start", "finish")) == 2
    assert committed(folder) == 44 and "Under way" not in folder.read(REPORT).decode()


@pytest.mark.parametrize("nohup", [False, True])
def test_a_run_whose_terminal_closes_saves_a_checkpoint_and_records_why(
    nohup: bool, env: dict[str, str], tmp_path: Path
) -> None:
    """With `nohup` it trains to its end."""
    folder, (terminal, inside) = RunFolder(str(tmp_path), "run"), os.openpty()
    command = [*["nohup"] * nohup, sys.executable, str(ROOT / IMAGENET), *OPTIONS, "--name", "run"]
    command += ["--storage", str(tmp_path), "--epochs", "4" if nohup else "60"]

    def login() -> None:
        os.login_tty(inside)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup

    process = subprocess.Popen(command, cwd=tmp_path, env=env, preexec_fn=login)
    os.close(inside)
    (tmp_path / "log").touch()
    try:
        wait_for(lambda: committed(folder) >= 20, process, tmp_path)
        os.close(terminal)
        os.killpg(process.pid, signal.SIGHUP)  # as a shell does
        assert process.wait(300) == (0 if nohup else 130)
    finally:
        kill([*descendants(process.pid), process.pid])
        process.wait()
    *_, last = events(folder, "left", "interrupt", "finish")
    if nohup:
        assert last["event"] == "finish" and committed(folder) == 4 * 1437 // 64
    else:
        (left,) = events(folder, "left")
        assert left["step"] == committed(folder) and "terminal" in last["why"]
