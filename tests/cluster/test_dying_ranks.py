"""Ranks die, fail or hang at chosen points of a job with a fixed number of workers: the others train on."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.detection import SHAPES
from jobs.detection import open_data as open_shapes
from jobs.imagenet import DIGITS
from raydali.data.stream.stream import Stream
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT, committed, descendants, kill, start_job
from tests.support.messages import mentions
from tests.support.traces import assert_whole
from tests.support.watched_job import events, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEAD = """
import os, signal, time
import jobs.JOB as job
from dataclasses import replace
from raydali.launch.driver.command import run_job
true_train = job.train
def is_first(name):
    try:
        open(f"FOLDER/{name}", "x").close()
    except FileExistsError:
        return False
    return True
def die_once(name, wait=0.0):
    if is_first(name):
        time.sleep(wait)
        os.kill(os.getpid(), signal.SIGKILL)
def train(options, data, session):
"""
TAIL = """
    true_train(options, data, session)
job.train = train
run_job(replace(job.JOB, train=job.train))
"""


def changed(tmp_path: Path, body: str, job: str) -> str:
    """Write a job that does this in each rank before it trains, and return its file; FOLDER is the test's folder."""
    file = tmp_path / "changed.py"
    file.write_text((HEAD.replace("JOB", job) + body + TAIL).replace("FOLDER", str(tmp_path)))
    return str(file)


def run(
    tmp_path: Path, env: dict[str, str], body: str, *options: str, batch_size: int = 16, job: str = "imagenet"
) -> tuple["subprocess.CompletedProcess[str]", RunFolder]:
    """Run such a job on three workers to its end."""
    command = [sys.executable, changed(tmp_path, body, job), "--workers", "3"]
    command += ["--batch-size", str(batch_size), "--global-batch-size", str(3 * batch_size)]
    command += ["--trace-samples", "--name", "run", "--storage", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    return done, RunFolder(str(tmp_path), "run")


def stream_of(epochs: int) -> Stream:
    """The stream of such a run."""
    return replace(DIGITS, epochs=epochs, global_batch_size=48, batch_size=16).stream(1437)


DIES_BETWEEN_STEPS = """
    PLAN = {("sum", 1): 60, ("flushed", 0): 110, ("sum", 0): 160, ("flushed", 2): 210}  # from which step on each dies
    from raydali.launch.worker.checkpointing import RunState
    from raydali.train.worker import Worker
    def dies(point, rank):
        if session.cursor.done >= PLAN.get((point, rank), 10 ** 9):
            die_once(f"{point}-{rank}")
    true_sum, true_flush = Worker.sum, RunState._flush_trace
    def sum_or_die(self, tensor):
        dies("sum", self.share)
        return true_sum(self, tensor)
    def flush_and_die(self, **options):
        why = true_flush(self, **options)
        dies("flushed", self._worker.share)
        return why
    Worker.sum, RunState._flush_trace = sum_or_die, flush_and_die
"""


DIES_BEFORE_THE_FIRST_STEP = """
    from raydali.launch.worker.step import Step
    true_update, done = Step.update, []
    def update(self, *arguments, **options):
        done.append(self.is_warm_up)
        if (session.worker.share, sum(done)) in PLAN and self.is_warm_up:
            die_once(session.worker.share)
        return true_update(self, *arguments, **options)
    Step.update = update
"""


@pytest.mark.parametrize(
    "plan", [{(0, 1)}, {(1, 1), (2, 1)}, {(1, 3)}], ids=["rank 0", "two", "while the ceiling is measured"]
)
def test_ranks_lost_before_the_first_step_are_replaced(
    plan: set[tuple[int, int]], env: dict[str, str], tmp_path: Path
) -> None:
    """`plan` has ranks, and the warm-up step in which each dies."""
    done, folder = run(tmp_path, env, DIES_BEFORE_THE_FIRST_STEP.replace("PLAN", repr(plan)), "--epochs", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    lost = [rank for row in events(folder, "replace") for rank in row["ranks"]]
    assert sorted(lost) == sorted(rank for rank, _ in plan)
    assert len(events(folder, "rejoin")) == len(plan) and not events(folder, "failure", "resume")
    assert next(row["event"] for row in events(folder, "replace", "start")) == "replace"
    assert_whole(folder, stream_of(12))
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == [*range(12)]


def test_ranks_lost_in_a_validation_or_a_checkpoint_are_replaced(env: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 dies in a validation, rank 0 after a checkpoint's exchange, rank 0 in a validation, rank 2 before one."""
    done, folder = run(tmp_path, env, DIES_BETWEEN_STEPS, "--epochs", "20", "--checkpoint-every", "20")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [rank for row in events(folder, "replace") for rank in row["ranks"]] == [1, 0, 0, 2]
    assert len(events(folder, "rejoin")) == 4 and not events(folder, "failure", "resume")
    stream = stream_of(20)
    assert_whole(folder, stream)
    rows = folder.rows("epochs.jsonl")
    assert [row["epoch"] for row in rows] == [*range(20)]
    assert sum(row["images"] for row in rows) == stream.steps * stream.global_batch_size
    assert all(row["validation"]["images"] == 360 for row in rows)


HANGS_AS_IT_JOINS = """
    from raydali.launch.worker.step import Step
    true_update, worker = Step.update, session.worker
    def update(self, *arguments, **options):
        if worker.share == 1 and session.cursor.done == 25:
            die_once("died")
        return true_update(self, *arguments, **options)
    Step.update = update
    if not worker.joined and is_first("hung"):
        time.sleep(100_000)
"""


def test_a_replacement_that_hangs_is_ended_and_replaced(env: dict[str, str], tmp_path: Path) -> None:
    options = ["--epochs", "3", "--start-timeout", "30"]
    done, folder = run(tmp_path, env, HANGS_AS_IT_JOINS, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert mentions(done.stdout + done.stderr, "not ready within 30 s --start-timeout ended")
    assert [(row["ranks"], row["spares"]) for row in events(folder, "replace")] == [([1], 0), ([], 1)]
    assert len(events(folder, "rejoin")) == 1 and not events(folder, "failure", "resume", "hang")
    assert_whole(folder, stream_of(3))


def test_who_waits_for_a_replacement_hears_of_an_interrupt(env: dict[str, str], tmp_path: Path) -> None:
    """All save what they have trained, though the epoch cannot end yet."""
    script, folder = changed(tmp_path, HANGS_AS_IT_JOINS, "imagenet"), RunFolder(str(tmp_path), "run")
    options = ["--workers", "3", "--batch-size", "16", "--global-batch-size", "48", "--epochs", "3"]
    process = start_job(
        *options, "--name", "run", "--storage", str(tmp_path), env=env, log=tmp_path / "log", script=script
    )
    try:
        wait_for((tmp_path / "hung").exists, process, tmp_path)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) != 0
    finally:
        kill([*descendants(process.pid), process.pid])
    (left,) = events(folder, "left")
    assert left["notice"] == "stop" and committed(folder) == left["step"] == 29


ALL_DIE_IN_TURN = """
    from raydali.launch.worker.step import Step
    true_update, worker = Step.update, session.worker
    def update(self, *arguments, **options):
        time.sleep(0.15)
        is_whole = worker.joined and worker.membership.is_complete and not self.is_warm_up
        if is_whole and session.cursor.done > 2 and worker.membership.members[0] == worker.share:  # the oldest
            die_once(worker.share)
        return true_update(self, *arguments, **options)
    Step.update = update
"""


def test_the_record_of_an_epoch_through_which_no_rank_lived_is_whole(env: dict[str, str], tmp_path: Path) -> None:
    done, folder = run(tmp_path, env, ALL_DIE_IN_TURN, "--epochs", "1", batch_size=4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [rank for row in events(folder, "replace") for rank in row["ranks"]] == [0, 1, 2]
    assert len(events(folder, "rejoin")) == 3 and not events(folder, "failure", "resume")
    (row,) = folder.rows("epochs.jsonl")
    stream = replace(DIGITS, epochs=1, global_batch_size=12, batch_size=4).stream(1437)
    assert row["images"] == stream.steps * stream.global_batch_size


DIES_AS_IT_DETECTS = """
    from raydali.launch.worker.step import Step
    from raydali.train.worker import Worker
    def dies(owner, name, rank, step):
        true = getattr(owner, name)
        def or_die(self, *arguments):
            if session.worker.share == rank and session.cursor.done >= step:
                die_once(name)
            return true(self, *arguments)
        setattr(owner, name, or_die)
    dies(Step, "backward", 1, 3)
    dies(Worker, "gather_bytes", 0, 20)  # the boxes that it has found in the second validation
"""


def test_detectors_are_replaced_too(env: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 dies in a step, and rank 0 in a validation, in which ranks send each other the boxes that they found."""
    options = ["--epochs", "3", "--image-size", "64"]
    done, folder = run(tmp_path, env, DIES_AS_IT_DETECTS, *options, batch_size=8, job="detection")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [rank for row in events(folder, "replace") for rank in row["ranks"]] == [1, 0]
    assert len(events(folder, "rejoin")) == 2 and not events(folder, "failure", "resume")
    data = open_shapes(SHAPES)
    assert_whole(folder, replace(SHAPES, epochs=3, global_batch_size=24, batch_size=8).stream(len(data.train)))
    assert [row["validation"]["images"] for row in folder.rows("epochs.jsonl")] == [len(data.val)] * 3


DIES_BEFORE_IT_WRITES = """
    from raydali.launch.worker.checkpointing import RunState
    def first_dies(owner, name, epochs, wait=1.0):
        true = getattr(owner, name)
        def dies(self, *arguments):
            done, (first, last) = session.cursor.done, (30 * epoch for epoch in epochs)
            if session.worker.rank == 0 and first <= done <= last:
                die_once(name, wait)
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
"""


def test_a_successor_writes_what_rank_0_has_not_written(env: dict[str, str], tmp_path: Path) -> None:
    done, folder = run(tmp_path, env, DIES_BEFORE_IT_WRITES, "--epochs", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [len(row["ranks"]) for row in events(folder, "replace")] == [1] * 4
    assert len(events(folder, "rejoin")) == 4 and not events(folder, "failure", "resume")
    stream = stream_of(12)
    assert committed(folder) == stream.steps == 12 * 30 - 1
    assert_whole(folder, stream)
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == [*range(12)]
    assert folder.read_json("model.json")["best"] == {"epoch": 5, "metric": "top1", "score": 1.0}
    shown = [line.split()[0] for line in done.stdout.splitlines() if line[:8].strip().split(" ")[0].isdigit()]
    assert shown == [str(epoch) for epoch in range(12)]


FAILS = """
    from raydali.launch.worker.step import Step
    true_backward = Step.backward
    def backward(self, *arguments):
        first = self._pending.micro_batch.index == 1 and self.index == 60
        if first and (EACH_TIME or is_first("failed")):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return true_backward(self, *arguments)
    Step.backward = backward
"""


@pytest.mark.parametrize("each_time", [False, True])
def test_a_rank_that_fails_is_replaced_unless_others_fail_in_its_place(
    each_time: bool, env: dict[str, str], tmp_path: Path
) -> None:
    done, folder = run(tmp_path, env, FAILS.replace("EACH_TIME", str(each_time)), "--epochs", "12")
    losses = events(folder, "replace")
    assert losses[0]["ranks"] == [1] and "CUDA error: an illegal memory access" in losses[0]["error"]
    assert not events(folder, "resume")
    if each_time:  # the third one may fail, too, before the driver ends
        assert done.returncode == 1 and "would recur" in done.stderr and "changed.py" in done.stderr, done.stderr
        assert len(losses) == 2
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert not events(folder, "failure") and len(losses) == len(events(folder, "rejoin")) == 1
        assert_whole(folder, stream_of(12))
