"""Ranks of a run with a fixed number of workers are killed or frozen from outside: the others train on."""

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.cluster import kill
from tests.support.traces import assert_whole
from tests.support.watched_job import STREAM, events, running, trainers, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


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

        def new() -> set[int]:
            return {*trainers(process.pid)} - {*known}

        for lost in (known[0], known[1]):
            began, spares = time.time(), len(events(folder, "spare"))
            kill([lost])
            wait_for(partial(lambda spares: len(events(folder, "spare")) > spares, spares), process, tmp_path)
            found: list[int] = []

            def is_one(found: list[int] = found) -> bool:  # a fork of a worker has its name for a moment
                found[:] = new()
                return len(found) == 1

            wait_for(is_one, process, tmp_path)
            (idle,) = found
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


def test_a_replacement_is_replaced_too(env: dict[str, str], tmp_path: Path) -> None:
    with running(env, tmp_path) as (process, folder):
        known = trainers(process.pid)

        def new() -> set[int]:
            return {*trainers(process.pid)} - {*known}

        kill(known[1:])
        for _ in range(2):
            wait_for(lambda: bool(new()), process, tmp_path)
            replacements = new()
            kill([*replacements])
            known += replacements  # without the next one, which may be there already
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
