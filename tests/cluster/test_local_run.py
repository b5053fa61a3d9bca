"""`python jobs/imagenet.py` on a Ray of its own: the demo, resumes after SIGKILL, and how it ends."""

import os
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.imagenet import DIGITS
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.labeled import LabeledFiles
from raydali.run.folder import RunFolder
from tests.support.cluster import (
    committed,
    descendants,
    environment,
    kill,
    name_of,
    run_job,
    start_job,
    wait_until_gone,
)
from tests.support.messages import mentions
from tests.support.traces import assert_whole, read_samples


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("user") / "home"
    home.mkdir()
    return home


def events_of(folder: RunFolder) -> list[dict[str, Any]]:
    """All but that a ceiling was measured again, as on a machine under load it may be."""
    return [event for event in folder.rows("events.jsonl") if event["event"] != "ceiling"]


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in events]


@pytest.mark.xdist_group("ray")
def test_the_demo_trains_and_leaves_nothing_behind(home: Path, tmp_path: Path) -> None:
    env, folder = environment(home), RunFolder(str(home / "raydali-runs"), "demo")
    code, output = run_job("--name", "demo", "--epochs", "4", env=env, log=tmp_path / "log")
    assert code == 0, output
    assert "this is the demo" in output and "--data DIR" in output
    assert "Traceback" not in output and "\x1b" not in output

    rows = folder.rows("epochs.jsonl")
    assert [row["epoch"] for row in rows] == list(range(4))
    last = rows[-1]
    assert last["validation"]["images"] == 360
    assert last["validation"]["top1"] > 0.8
    assert last["world_size"] == 2 and [rank["rank"] for rank in last["ranks"]] == [0, 1]
    best = max(range(4), key=lambda epoch: rows[epoch]["validation"]["top1"])
    finished = output.splitlines()[-1]
    assert finished.startswith(f"finished: {folder}: ")
    assert mentions(finished, f"top1 {last['validation']['top1']:.4g} 3 {rows[best]['validation']['top1']:.4g} {best}")
    assert sum(row["images"] for row in rows) == last["samples_consumed"] == last["step"] * 64
    assert last["seconds"] >= last["loader_wait_seconds"] + last["step_seconds"] - 1e-6
    assert kinds(events_of(folder)) == ["chosen", "rehearsal", "start", "checkpoint", "finish"]
    assert folder.exists("best/model.safetensors")
    assert len([*Path(folder.path()).glob("checkpoint_0*")]) == 3

    assert {path.name for path in home.iterdir()} == {"raydali-runs"}, "the home folder is touched"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_that_was_stopped_after_an_epoch_says_so_and_goes_on(home: Path, tmp_path: Path) -> None:
    folder, given = RunFolder(str(tmp_path), "part"), ["--name", "part", "--storage", str(tmp_path), "--epochs", "3"]
    for _ in range(2):  # the second time, at once
        code, output = run_job(*given, "--stop-after", "1", env=environment(home), log=tmp_path / "log")
        assert code == 0 and mentions(output, "ended early --stop-after 1"), output
        assert kinds(events_of(folder)) == ["chosen", "rehearsal", "start", "checkpoint", "early end"]
        assert committed(folder) == 1437 // 64 + 1 and len(folder.rows("epochs.jsonl")) == 1
        assert "Ended early after 1 of 3 epochs" in folder.read("report.html").decode()
    code, output = run_job(*given, env=environment(home), log=tmp_path / "log")
    assert code == 0 and "changed setting" not in output and "ended early" not in output, output
    assert kinds(events_of(folder))[4:] == ["early end", "resume", "finish"]
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == [0, 1, 2]


@pytest.mark.slow
def test_the_demo_learns_the_digits(home: Path, tmp_path: Path) -> None:
    code, output = run_job("--name", "whole", env=environment(home), log=tmp_path / "log")
    assert code == 0 and "this is the demo" in output, output
    rows = RunFolder(str(home / "raydali-runs"), "whole").rows("epochs.jsonl")
    assert len(rows) == DIGITS.epochs and rows[-1]["validation"]["top1"] >= 0.97


@pytest.mark.slow
def test_killed_runs_resume_exactly_on_other_workers(home: Path, tmp_path: Path) -> None:
    """SIGKILL to driver and workers in mid-epoch, on 2 workers, then on 3; 1 worker ends the run."""
    env, folder = environment(home), RunFolder(str(tmp_path), "killed")
    config = replace(DIGITS, epochs=30, batch_size=16, global_batch_size=96)
    options = ["--name", "killed", "--storage", str(tmp_path), "--trace-samples", "--checkpoint-every", "5"]
    options += ["--epochs", "30", "--batch-size", "16", "--global-batch-size", "96"]
    below: list[int] = []
    for workers, until in ((2, 50), (3, 160)):
        if workers == 3:  # a disk that lost what was written to it
            newest = f"checkpoint_{committed(folder):09d}/state.pt"
            folder.write(newest, folder.read(newest)[:-100])
        process = start_job(*options, "--workers", str(workers), env=env, log=tmp_path / "log")
        deadline, trainers = time.monotonic() + 600, []
        try:
            while committed(folder) < until:
                assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.02)
            below += descendants(process.pid)
            trainers = [pid for pid in descendants(process.pid) if "RayTrainWorker" in name_of(pid)]
            assert len(trainers) == workers
        finally:
            kill([process.pid, *(trainers or descendants(process.pid))])
            process.wait()
        cores = len(os.sched_getaffinity(0))
        said = mentions((tmp_path / "log").read_text(), f"warning: {workers} workers {cores} --cpus-per-worker")
        assert said == (workers > cores)
    code, output = run_job(*options, "--workers", "1", env=env, log=tmp_path / "log")
    assert code == 0, output

    assert_whole(folder, config.stream(1437))
    table = read_samples(folder)
    assert set(table["rank"].to_pylist()) == {0, 1, 2}
    rows = folder.rows("epochs.jsonl")
    assert [row["epoch"] for row in rows] == list(range(30))
    assert sum(row["images"] for row in rows) == len(table)
    events = events_of(folder)
    assert events.pop(0)["event"] == "chosen"
    assert kinds(events) == ["rehearsal", "start", "checkpoint", "bad checkpoint", "resume", "resume", "finish"]
    assert "bytes, not" in events[3]["reason"]
    assert 45 <= events[4]["step"] < int(events[3]["path"].rpartition("_")[2]) and events[5]["step"] >= 160
    assert [event.get("world_size") for event in events] == [None, 2, None, None, 3, 1, None]
    # Ray's agents try to tell the dead head for 60 s, the rest goes at once.
    left = wait_until_gone([pid for pid in below if "agent" not in name_of(pid)])
    kill(below)
    assert not left, left


@pytest.mark.slow
def test_a_run_of_one_worker_grows_and_shrinks_in_mid_epoch(home: Path, tmp_path: Path) -> None:
    """Its micro-batches are divided for 2 and 4 workers, and whole again for 1, in blocks of their own."""
    env, folder, log = environment(home), RunFolder(str(tmp_path), "grown"), tmp_path / "log"
    config = replace(DIGITS, epochs=12, global_batch_size=32, shuffle_block=10, shuffle_window=4, shuffle_apart=True)
    options = ["--name", "grown", "--storage", str(tmp_path), "--trace-samples", "--checkpoint-every", "5"]
    options += ["--epochs", "12", "--shuffle-block", "10", "--shuffle-window", "4", "--shuffle-apart", "--no-ceiling"]
    for workers, until in ((1, 20), (2, 100), (4, 200)):
        if workers == 2:
            code, output = run_job(*options, "--workers", "2", "--batch-size", "32", env=env, log=log)
            assert code == 2 and mentions(output, "2 workers 1 micro-batch (32 / 32) --batch-size 16"), output
        given = "--workers", str(workers), "--batch-size", str(32 // workers)
        process = start_job(*options, *given, env=env, log=log)
        deadline = time.monotonic() + 600
        try:
            while committed(folder) < until:
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            assert process.wait(240) == 130, log.read_text()
        finally:
            process.kill()
        settings = folder.read_json("config.json")
        assert settings["batch_size"] == 32 // workers
        assert settings["order_batch_size"] == (None if workers == 1 else 32)
    code, output = run_job(*options, "--workers", "1", "--batch-size", "32", env=env, log=log)
    assert code == 0 and mentions(output, "batch_size 8 32 BatchNorm random"), output
    assert_whole(folder, config.stream(1437))
    changed = [event["changed"] for event in folder.rows("events.jsonl") if event["event"] == "settings"]
    assert changed == [{"batch_size": [32, 16]}, {"batch_size": [16, 8]}, {"batch_size": [8, 32]}]
    assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == list(range(12))


@pytest.mark.slow
def test_an_early_interrupt_reports_that_nothing_was_saved(home: Path, tmp_path: Path) -> None:
    options = ["--epochs", "2", "--name", "early", "--storage", str(tmp_path)]
    process = start_job(*options, env=environment(home), log=tmp_path / "log")
    try:
        while "run " not in (tmp_path / "log").read_text():
            assert process.poll() is None
            time.sleep(0.05)
        below = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 130
    finally:
        process.kill()
    *_, last = (tmp_path / "log").read_text().splitlines()
    assert mentions(last, "interrupted checkpoint beginning")
    assert not wait_until_gone(below)
    assert [row["event"] for row in events_of(RunFolder(str(tmp_path), "early"))] == ["interrupt"]


def killed_and_resumed(option: str, value: str, home: Path, tmp_path: Path) -> RunFolder:
    """A run of 8 epochs: SIGKILL in mid-epoch on 2 workers; 3 workers end it, with the same option only."""
    env, folder = environment(home), RunFolder(str(tmp_path), "resumed")
    options = ["--name", "resumed", "--storage", str(tmp_path), "--trace-samples", "--checkpoint-every", "5"]
    options += ["--epochs", "8", "--batch-size", "16", "--global-batch-size", "96", "--no-ceiling"]
    process = start_job(*options, option, value, "--workers", "2", env=env, log=tmp_path / "log")
    deadline = time.monotonic() + 600
    try:
        while committed(folder) < 40:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.02)
    finally:
        below = descendants(process.pid)
        kill([process.pid, *below])
        process.wait()
    code, output = run_job(*options, "--workers", "3", env=env, log=tmp_path / "log")
    assert code == 2 and mentions(output, f"{option[2:].replace('-', '_')} {value}"), output
    code, output = run_job(*options, option, value, "--workers", "3", env=env, log=tmp_path / "log")
    assert code == 0, output
    return folder


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_places_of_sampled_classes_come_once_each_across_a_resume(home: Path, tmp_path: Path) -> None:
    folder = killed_and_resumed("--class-sampling", "balanced", home, tmp_path)
    config = replace(DIGITS, epochs=8, batch_size=16, global_batch_size=96, class_sampling="balanced")
    labels = LabeledFiles.scan(f"{digits_folder()}/train").labels
    stream, table = config.stream(1437, labels), read_samples(folder)
    assert_whole(folder, stream)
    assert set(table["rank"].to_pylist()) == {0, 1, 2}
    places = Counter(zip(*(table[name].to_pylist() for name in ("epoch", "id", "repeat")), strict=True))
    assert {*places.values()} == {1} and any(repeat for *_, repeat in places)
    of_classes = Counter(int(labels[id]) for epoch, id, _ in places if epoch < 7)
    assert all(abs(count - 7 * 143.7) <= 7 for count in of_classes.values()), "to a place an epoch"


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_repeats_come_once_each_across_a_resume_on_other_workers(home: Path, tmp_path: Path) -> None:
    """The run's last cycle has two of three epochs."""
    folder = killed_and_resumed("--repeats", "3", home, tmp_path)
    config = replace(DIGITS, epochs=8, batch_size=16, global_batch_size=96, repeats=3)
    stream, table = config.stream(1437), read_samples(folder)
    assert_whole(folder, stream)
    assert set(table["rank"].to_pylist()) == {0, 1, 2} and folder.read_json("config.json")["repeats"] == 3
    samples = Counter(zip(*(table[name].to_pylist() for name in ("epoch", "id", "repeat")), strict=True))
    assert len(table) == stream.steps * 96 and {*samples.values()} == {1}
    in_cycles = Counter((epoch // 3, id) for epoch, id, _ in samples)
    assert {count for (cycle, _), count in in_cycles.items() if cycle < 2} == {3}
    assert sum(cycle < 2 for cycle, _ in in_cycles) == 2 * 1437
    windows = sum(count == 3 for (cycle, _), count in in_cycles.items() if cycle == 2)
    assert windows == 2 * 479 - (8 * 1437 - len(table)), "two of three windows, without what the run's end leaves"
