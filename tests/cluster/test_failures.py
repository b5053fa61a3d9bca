"""Nodes taken away, frozen and killed workers, interruptions: a run loses nothing, and goes on soon."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.imagenet import DIGITS
from raydali.run.folder import RunFolder
from raydali.run.sample_trace import read_samples
from tests.support.cluster import (
    RAY,
    ROOT,
    committed,
    descendants,
    environment,
    kill,
    name_of,
    nodes,
    start_job,
)
from tests.support.messages import mentions
from tests.support.traces import assert_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
EPOCHS = 60
OPTIONS = ["--epochs", str(EPOCHS), "--trace-samples", "--checkpoint-every", "20", "--global-batch-size", "64"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    home.mkdir()
    return environment(home)


@contextmanager
def running(env: dict[str, str], tmp_path: Path, *options: str) -> Iterator[tuple[Any, RunFolder]]:
    """The image job, past its first checkpoint."""
    folder = RunFolder(str(tmp_path), "run")
    process = start_job(*OPTIONS, *options, "--name", "run", "--storage", str(tmp_path), env=env, log=tmp_path / "log")
    try:
        wait_for(lambda: committed(folder) >= 20, process, tmp_path)
        yield process, folder
    finally:
        kill([*descendants(process.pid), process.pid])
        process.wait()


def wait_for(condition: Callable[[], bool], process: Any, tmp_path: Path, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)


def trainers(pid: int) -> list[int]:
    return [below for below in descendants(pid) if "RayTrainWorker" in name_of(below)]


def events(folder: RunFolder, *names: str) -> list[dict[str, Any]]:
    return [row for row in folder.rows("events.jsonl") if row["event"] in names]


STREAM = replace(DIGITS, epochs=EPOCHS, global_batch_size=64).stream(1437)


def test_a_frozen_rank_is_named_ended_and_started_again(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path, "--hang-timeout", "10", "--no-replace") as (process, folder):
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
        "from raydali.launch.driver.command import run_main\n"
        "true_train = job.train\n"
        "def train(options, data, session):\n"
        f"    if session.worker.rank == 1 and not os.path.exists('{tmp_path}/hung'):\n"
        f"        open('{tmp_path}/hung', 'w').close()\n"
        "        time.sleep(3600)\n"
        "    gloo = torch.distributed.group.WORLD._get_backend(session.worker.device)\n"
        f"    open('{tmp_path}/timeout', 'w').write(str(gloo.options._timeout.total_seconds()))\n"
        "    true_train(options, data, session)\n"
        "job.train = train\n"
        "run_main(job.main)\n"
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
    with running(env, tmp_path, "--no-replace") as (process, folder):
        began = time.time()
        kill(trainers(process.pid)[:1])
        wait_for(lambda: bool(events(folder, "resume")), process, tmp_path)
        started, resumed = events(folder, "start")[0], events(folder, "resume")[0]
        print(f"noticed after {events(folder, 'failure')[0]['time'] - began:.1f} s,", end=" ")
        print(f"next step after {resumed['time'] - began:.1f} s; the first start took {started['seconds']:.1f} s")
        assert process.wait(180) == 0
        assert_whole(folder, STREAM)


@pytest.mark.parametrize("signals", [{0: signal.SIGKILL}, {1: signal.SIGKILL, 2: signal.SIGKILL}, {1: signal.SIGSTOP}])
def test_lost_ranks_are_replaced_while_others_train(
    env: dict[str, str], tmp_path: Path, signals: dict[int, signal.Signals]
) -> None:
    """Rank 0; two at once; and one that is frozen, until it is killed."""
    with running(env, tmp_path, "--workers", "3", "--batch-size", "8", "--hang-timeout", "10") as (process, folder):
        workers, began = trainers(process.pid), time.time()
        for index, sent in signals.items():
            os.kill(workers[index], sent)
        wait_for(lambda: len(events(folder, "rejoin")) == len(signals), process, tmp_path)
        print(f"lost after {events(folder, 'replace')[0]['time'] - began:.1f} s,", end=" ")
        print(f"all are back after {events(folder, 'rejoin')[-1]['time'] - began:.1f} s")
        assert {*trainers(process.pid)} > {pid for index, pid in enumerate(workers) if index not in signals}
        assert process.wait(180) == 0
        lost = [rank for row in events(folder, "replace") for rank in row["ranks"]]
        assert sorted(lost) == sorted(row["rank"] for row in events(folder, "rejoin"))
        assert not events(folder, "failure", "resume")
        assert_whole(folder, STREAM)
        assert sum(row["images"] for row in folder.rows("epochs.jsonl")) == STREAM.steps * STREAM.global_batch_size


def test_a_spare_takes_the_place_of_a_lost_rank(env: dict[str, str], tmp_path: Path) -> None:
    """The spare joins at once, and what replaces the lost worker is the next spare. An idle spare is replaced, too."""
    options = ["--workers", "2", "--spares", "1", "--batch-size", "16", "--epochs", "90"]
    with running(env, tmp_path, *options) as (process, folder):
        wait_for(lambda: bool(events(folder, "spare")), process, tmp_path)
        known = trainers(process.pid)
        assert len(known) == 3
        for lost in (known[0], known[1]):
            began, spares = time.time(), len(events(folder, "spare"))
            kill([lost])
            wait_for(partial(lambda spares: len(events(folder, "spare")) > spares, spares), process, tmp_path)
            (idle,) = {*trainers(process.pid)} - {*known}
            known.append(idle)
            rejoin = events(folder, "rejoin")[-1]
            print(f"a spare has trained its first step {rejoin['time'] - began:.1f} s later")
            assert rejoin["phases"].keys() <= {"join", "first batch", "first step"}, "it began anew"
        kill([idle])
        wait_for(lambda: len(events(folder, "replace")) == 3, process, tmp_path)
        assert process.wait(240) == 0, (tmp_path / "log").read_text()
        replaced = events(folder, "replace")
        assert sorted(rank for row in replaced for rank in row["ranks"]) == [0, 1]
        assert [row["spares"] for row in replaced] == [0, 0, 1]
        assert len(events(folder, "rejoin")) == 2 and not events(folder, "failure", "resume")
        assert_whole(folder, replace(STREAM, epochs=90, global_batch_size=64, batch_size=16))


DIES_BETWEEN_STEPS = """
import os, signal
import jobs.imagenet as job
from raydali.launch.driver.command import run_main
true_train = job.train
PLAN = {("sum", 1): 60, ("flushed", 0): 110, ("sum", 0): 160, ("flushed", 2): 210}  # from which step on each dies
def train(options, data, session):
    from raydali.launch.worker.checkpointing import RunState
    from raydali.train.worker import Worker
    def dies(point, rank):
        if session.cursor.done >= PLAN.get((point, rank), 10 ** 9):
            try:
                open(f"FOLDER/{point}-{rank}", "x").close()
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)
    true_sum, true_flush = Worker.sum, RunState._flush_trace
    def sum_or_die(self, tensor):
        dies("sum", self.share)
        return true_sum(self, tensor)
    def flush_and_die(self, **options):
        why = true_flush(self, **options)
        dies("flushed", self._worker.share)
        return why
    Worker.sum, RunState._flush_trace = sum_or_die, flush_and_die
    true_train(options, data, session)
job.train = train
run_main(job.main)
"""


def test_ranks_lost_in_a_validation_or_a_checkpoint_are_replaced(env: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 dies in a validation, rank 0 after a checkpoint's exchange, rank 0 in a validation, rank 2 before one."""
    script = tmp_path / "dies.py"
    script.write_text(DIES_BETWEEN_STEPS.replace("FOLDER", str(tmp_path)))
    options = [*OPTIONS, "--workers", "3", "--batch-size", "16", "--epochs", "20", "--name", "run"]
    options[options.index("--global-batch-size") + 1] = "48"
    command = [sys.executable, str(script), *options, "--storage", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(str(tmp_path), "run")
    assert [rank for row in events(folder, "replace") for rank in row["ranks"]] == [1, 0, 0, 2]
    assert len(events(folder, "rejoin")) == 4 and not events(folder, "failure", "resume")
    stream = replace(DIGITS, epochs=20, global_batch_size=48, batch_size=16).stream(1437)
    assert_whole(folder, stream)
    rows = folder.rows("epochs.jsonl")
    assert [row["epoch"] for row in rows] == [*range(20)]
    assert sum(row["images"] for row in rows) == stream.steps * stream.global_batch_size
    assert all(row["validation"]["images"] == 360 for row in rows)


DIES_BEFORE_IT_WRITES = """
import os, signal, time
import jobs.imagenet as job
from raydali.launch.driver.command import run_main
true_train = job.train
def train(options, data, session):
    from raydali.launch.worker.checkpointing import RunState
    def first_dies(owner, name, epochs, wait=1.0):
        true = getattr(owner, name)
        def dies(self, *arguments):
            done, (first, last) = session.cursor.done, (30 * epoch for epoch in epochs)
            if session.worker.rank == 0 and first <= done <= last and not os.path.exists(f"FOLDER/{name}"):
                open(f"FOLDER/{name}", "x").close()
                time.sleep(wait)
                os.kill(os.getpid(), signal.SIGKILL)
            return true(self, *arguments)
        setattr(owner, name, dies)
    first_dies(RunState, "add_epoch", (3, 4))  # after it got the records of others, who go on
    first_dies(RunState, "_complete", (6, 6))  # while it writes a checkpoint, and the best weights of the run
    first_dies(RunState, "_copy", (9, 10))
    first_dies(type(session), "finish", (11, 12), 0.0)  # while it writes the last one
    true_best = RunState.best_of
    def best_of(self, score, weights, *, epoch, **options):
        return true_best(self, 1.0 if epoch == 5 else 0.01 * epoch, weights, epoch=epoch, **options)
    RunState.best_of = best_of
    true_train(options, data, session)
job.train = train
run_main(job.main)
"""


def test_a_successor_writes_what_rank_0_has_not_written(env: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES_BEFORE_IT_WRITES.replace("FOLDER", str(tmp_path)))
    options = ["--workers", "3", "--batch-size", "16", "--global-batch-size", "48", "--epochs", "12", "--name", "run"]
    command = [sys.executable, str(script), *options, "--trace-samples", "--storage", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = RunFolder(str(tmp_path), "run")
    assert [len(row["ranks"]) for row in events(folder, "replace")] == [1] * 4
    assert len(events(folder, "rejoin")) == 4 and not events(folder, "failure", "resume")
    stream = replace(DIGITS, epochs=12, global_batch_size=48, batch_size=16).stream(1437)
    assert committed(folder) == stream.steps == 12 * 30 - 1
    assert_whole(folder, stream)
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == [*range(12)]
    assert folder.read_json("model.json")["best"] == {"epoch": 5, "metric": "top1", "score": 1.0}
    shown = [line.split()[0] for line in done.stdout.splitlines() if line[:8].strip().split(" ")[0].isdigit()]
    assert shown == [str(epoch) for epoch in range(12)]


def test_a_replacement_is_replaced_too(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path) as (process, folder):
        known = trainers(process.pid)

        def new() -> set[int]:
            return {*trainers(process.pid)} - {*known}

        kill(known[1:])
        for _ in range(2):
            wait_for(lambda: bool(new()), process, tmp_path)
            kill([*new()])
            known += new()
        wait_for(lambda: bool(events(folder, "rejoin")), process, tmp_path)
        assert process.wait(180) == 0
        assert events(folder, "replace") and not events(folder, "failure", "resume")
        assert_whole(folder, STREAM)


def test_others_may_be_lost_while_a_replacement_starts(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path, "--workers", "3", "--batch-size", "8") as (process, folder):
        known = trainers(process.pid)
        kill(known[2:])
        wait_for(lambda: len({*trainers(process.pid)} - {*known}) == 1, process, tmp_path)
        (starting,) = {*trainers(process.pid)} - {*known}
        os.kill(starting, signal.SIGSTOP)
        kill(known[1:2])
        wait_for(lambda: len(events(folder, "replace")) == 2, process, tmp_path)
        assert not events(folder, "rejoin")
        os.kill(starting, signal.SIGCONT)
        wait_for(lambda: len(events(folder, "rejoin")) == 2, process, tmp_path)
        assert process.wait(180) == 0
        assert not events(folder, "failure", "resume")
        assert_whole(folder, STREAM)


def test_all_restart_if_nobody_has_the_state(env: dict[str, str], tmp_path: Path) -> None:
    """The last rank is lost before the replacement of the other one has joined it."""
    with running(env, tmp_path) as (process, folder):
        known = trainers(process.pid)
        kill(known[1:])
        wait_for(lambda: bool({*trainers(process.pid)} - {*known}), process, tmp_path)
        kill(known[:1])
        wait_for(lambda: bool(events(folder, "resume")), process, tmp_path)
        assert process.wait(180) == 0
        assert events(folder, "replace") and events(folder, "failure")
        assert_whole(folder, STREAM)


def test_an_interrupted_run_saves_its_last_step(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path) as (process, folder):
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130
        (left,) = events(folder, "left")
        assert left["step"] == committed(folder) and left["notice"] == "stop"
        again = start_job(*OPTIONS, "--name", "run", "--storage", str(tmp_path), env=env, log=tmp_path / "log")
        assert again.wait(240) == 0, (tmp_path / "log").read_text()
        assert events(folder, "resume")[-1]["step"] == left["step"]
        assert_whole(folder, STREAM)


def test_what_would_recur_is_not_tried_for_ever(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "import runpy, sys\nimport jobs.imagenet as job\n"
        "def train(*a):\n    raise ValueError('the mixer is broken')\n"
        "job.train = train\nfrom raydali.launch.driver.command import run_main\nrun_main(job.main)\n"
    )
    command = [sys.executable, str(tmp_path / "broken.py"), "--name", "run", "--storage", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 1
    assert mentions(done.stderr, "ValueError: mixer") and mentions(done.stderr, "2 times")
    folder = RunFolder(str(tmp_path), "run")
    assert len(events(folder, "failure")) == 2
    assert mentions(events(folder, "stop")[0]["why"], "2 times")


def test_a_drained_node_is_left_behind_a_checkpoint(env: dict[str, str], tmp_path: Path) -> None:
    """Three nodes of one CPU beside the head; the job takes two of them, and one of these is drained."""
    with (
        nodes(env, tmp_path / "ray", ["1"], ["1"], ["1"]) as (using, ids),
        running(using, tmp_path, "--workers", "2") as (process, run),
    ):
        wait_for(lambda: bool(run.rows("epochs.jsonl")), process, tmp_path)
        occupied = {rank["node"] for row in run.rows("epochs.jsonl")[:1] for rank in row["ranks"]}
        drained = next(each for each in ids if each[:8] in occupied)
        began = time.time()
        command = [RAY, "drain-node", f"--address={using['RAY_ADDRESS']}", f"--node-id={drained}"]
        command += [
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=spot",
            "--deadline-remaining-seconds=60",
        ]
        subprocess.run(command, env=using, check=True, timeout=60)
        wait_for(lambda: bool(events(run, "resume")), process, tmp_path)
        (left,) = events(run, "left")
        resumed = events(run, "resume")[0]
        assert left["notice"] == "preemption" and resumed["step"] == left["step"], "nothing is done again"
        assert left["time"] - began < 60, "inside the grace period"
        assert not events(run, "failure") and events(run, "preemption")
        assert process.wait(240) == 0, (tmp_path / "log").read_text()
        assert drained[:8] not in {rank["node"] for rank in run.rows("epochs.jsonl")[-1]["ranks"]}
        assert_whole(run, STREAM)


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
