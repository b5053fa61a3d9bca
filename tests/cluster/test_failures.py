"""Frozen, hanging and killed workers, interruptions: a run restarts, and loses nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jobs.imagenet import DIGITS
from raydali.host.cpu_times import usable_cores
from raydali.run.folder import RunFolder
from tests.support.cluster import (
    ROOT,
    committed,
    descendants,
    kill,
    run_job,
    start_job,
    wait_until_gone,
)
from tests.support.messages import mentions
from tests.support.traces import assert_whole, read_samples
from tests.support.watched_job import OPTIONS, STREAM, events, running, trainers, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_frozen_rank_is_named_ended_and_started_again(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path, "--hang-timeout", "10") as (process, folder):
        frozen = trainers(process.pid)[1]
        began = time.time()
        os.kill(frozen, signal.SIGSTOP)
        wait_for(lambda: bool(events(folder, "resume")), process, tmp_path)
        (hang,) = events(folder, "hang")
        assert [(each["pid"], each["frozen"]) for each in hang["ranks"]] == [(frozen, True)]
        assert hang["time"] - began > 8
        assert process.wait(180) == 0
        assert mentions((tmp_path / "log").read_text(), f"warning: {frozen} frozen")
        assert_whole(folder, STREAM)


def test_a_rank_that_hangs_at_its_start_is_named_and_restarted(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(
        "import os, time\nimport torch\nimport jobs.imagenet as job\n"
        "from dataclasses import replace\nfrom raydali.launch.driver.command import run_job\n"
        "true_train = job.train\n"
        "def train(options, data, session):\n"
        f"    if session.worker.rank == 1 and not os.path.exists('{tmp_path}/hung'):\n"
        f"        open('{tmp_path}/hung', 'w').close()\n"
        "        time.sleep(3600)\n"
        "    gloo = torch.distributed.group.WORLD._get_backend(session.worker.device)\n"
        f"    open('{tmp_path}/timeout', 'w').write(str(gloo.options._timeout.total_seconds()))\n"
        "    true_train(options, data, session)\n"
        "job.train = train\n"
        "run_job(replace(job.JOB, train=job.train))\n"
    )
    options = ["--epochs", "2", "--start-timeout", "60", "--name", "run", "--storage", str(tmp_path)]
    command = [sys.executable, str(tmp_path / "hanging.py"), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    folder = RunFolder(str(tmp_path), "run")
    hang = events(folder, "hang")[0]
    ((rank, stack),) = [(each["rank"], each["stack"]) for each in hang["ranks"]]
    assert hang["starting"] and rank == 1 and "time.sleep(3600)" in stack
    assert events(folder, "start", "finish")
    assert float((tmp_path / "timeout").read_text()) == 900, "gloo must wait longer than the driver does"


def test_workers_restart_after_a_kill(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path) as (process, folder):
        began = time.time()
        kill(trainers(process.pid)[:1])
        wait_for(lambda: bool(events(folder, "resume")), process, tmp_path)
        started, resumed = events(folder, "start")[0], events(folder, "resume")[0]
        print(f"noticed after {events(folder, 'failure')[0]['time'] - began:.1f} s,", end=" ")
        print(f"next step after {resumed['time'] - began:.1f} s; the first start took {started['seconds']:.1f} s")
        assert process.wait(180) == 0
        assert [len(each["killed"]) for each in events(folder, "failure")] == [1]
        assert_whole(folder, STREAM)


def test_a_rank_that_cannot_answer_delays_no_restart(env: dict[str, str], tmp_path: Path) -> None:
    """A library that waits for a lost rank may hold Python's interpreter."""
    asked, held, script = tmp_path / "asked", tmp_path / "held", tmp_path / "holding.py"
    script.write_text(
        "import ctypes, os, threading, time\nimport jobs.imagenet as job\n"
        "from dataclasses import replace\nfrom raydali.launch.driver.command import run_job\n"
        "true_train = job.train\n"
        "def hold():\n"
        f"    while not os.path.exists('{asked}'):\n"
        "        time.sleep(0.01)\n"
        f"    os.remove('{asked}')\n"
        f"    with open('{held}', 'w') as file:\n"
        "        file.write(str(os.getpid()))\n"
        "    ctypes.PyDLL(None).sleep(3600)\n"
        "def train(options, data, session):\n"
        "    if session.worker.rank == 0:\n"
        "        threading.Thread(target=hold, daemon=True).start()\n"
        "    true_train(options, data, session)\n"
        "job.train = train\n"
        "run_job(replace(job.JOB, train=job.train))\n"
    )
    with running(env, tmp_path, script=str(script)) as (process, folder):
        asked.touch()
        wait_for(lambda: held.exists() and bool(held.read_text()), process, tmp_path)
        kill([each for each in trainers(process.pid) if each != int(held.read_text())])
        wait_for(lambda: bool(events(folder, "resume")), process, tmp_path)
        failed, resumed = events(folder, "failure")[0], events(folder, "resume")[0]
        began = resumed["time"] - sum(resumed["phases"].values())
        print(f"the new workers began {began - failed['time']:.1f} s after the failure was noticed")
        assert began - failed["time"] < 4
        assert process.wait(180) == 0
        assert_whole(folder, STREAM)


def test_an_interrupted_run_saves_its_last_step(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path) as (process, folder):
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130
        assert not wait_until_gone(below)
        output = (tmp_path / "log").read_text()
        assert "interrupted" in output and "Traceback" not in output
        (left,) = events(folder, "left")
        assert left["step"] == committed(folder) and left["notice"] == "stop"
        again = start_job(*OPTIONS, "--name", "run", "--storage", str(tmp_path), env=env, log=tmp_path / "log")
        assert again.wait(240) == 0, (tmp_path / "log").read_text()
        assert events(folder, "resume")[-1]["step"] == left["step"]
        assert_whole(folder, STREAM)


def test_workers_that_fail_while_they_start_free_their_resources(env: dict[str, str], tmp_path: Path) -> None:
    """Ray has no more CPUs than two workers need, so that the second group waits for those of the first."""
    wrong = env | {"GLOO_SOCKET_IFNAME": "nowhere"}
    options = ["--workers", "2", "--cpus-per-worker", str(usable_cores()), "--max-failures", "1"]
    options += ["--name", "run", "--storage", str(tmp_path)]
    code, output = run_job(*options, env=wrong, log=tmp_path / "log", timeout=240)
    assert code == 1 and mentions(output, "error: nowhere") and "--max-failures is 1" in output
    assert [each["starting"] for each in events(RunFolder(str(tmp_path), "run"), "failure")] == [True, True]


def test_a_worker_that_hangs_before_its_training_function_is_started_again(env: dict[str, str], tmp_path: Path) -> None:
    options = ["--epochs", "2", "--start-timeout", "30", "--name", "run", "--storage", str(tmp_path)]
    process = start_job(*options, env=env, log=tmp_path / "log")
    try:
        wait_for(lambda: bool(trainers(process.pid)), process, tmp_path)
        os.kill(trainers(process.pid)[0], signal.SIGSTOP)
        assert process.wait(240) == 0, (tmp_path / "log").read_text()
    finally:
        kill([*descendants(process.pid), process.pid])
    failed = events(RunFolder(str(tmp_path), "run"), "failure")[0]
    assert failed["starting"] and mentions(failed["error"], "30 --start-timeout")


@pytest.mark.timeout(2400)
def test_after_a_takeover_the_first_driver_writes_nothing(env: dict[str, str], tmp_path: Path) -> None:
    options = ["--epochs", "500", "--workers", "1", "--trace-samples", "--checkpoint-every", "10"]
    options += ["--name", "run", "--storage", str(tmp_path)]
    folder = RunFolder(str(tmp_path), "run")
    first = start_job(*options, env=env, log=tmp_path / "log")
    second = None
    try:
        wait_for(lambda: committed(folder) >= 20, first, tmp_path, 600)
        second = start_job(*options, env=env, log=tmp_path / "second")
        assert first.wait(600) == 1, (tmp_path / "second").read_text()
        *_, last = (tmp_path / "log").read_text().splitlines()
        assert mentions(last, "another driver") and "Traceback" not in (tmp_path / "log").read_text()
        wait_for(lambda: bool(events(folder, "resume")), second, tmp_path, 600)
        step = events(folder, "resume")[0]["step"]
        wait_for(lambda: committed(folder) > step, second, tmp_path, 600)
        second.send_signal(signal.SIGTERM)
        assert second.wait(120) == 130
    finally:
        for process in (first, second):
            if process is not None:
                kill([*descendants(process.pid), process.pid])
                process.wait()
    kinds = [row["event"] for row in folder.rows("events.jsonl")]
    assert kinds.count("start") == kinds.count("resume") == kinds.count("interrupt") == 1 and "stop" not in kinds
    steps = read_samples(folder)["step"].to_numpy()
    assert set(np.bincount(steps)[: committed(folder)]) == {DIGITS.batch_size}
