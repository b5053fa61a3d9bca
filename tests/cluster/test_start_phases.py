"""The first step and a restart by phase; workers are forks of a process that has imported what they use."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raydali.run.folder import RunFolder
from tests.support.cluster import committed, descendants, environment, kill, name_of, nodes, start_job, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.xdist_group("ray")]
OPTIONS = ["--epochs", "400", "--workers", "2", "--checkpoint-every", "10", "--global-batch-size", "64"]
OF_DRIVER = ["imports", "index", "cluster", "workers"]
OF_WORKER = ["worker start", "process group", "model", "first batch", "first step"]


def event(folder: RunFolder, name: str) -> dict[str, Any] | None:
    return next((row for row in folder.rows("events.jsonl") if row["event"] == name), None)


def awaited(look: Callable[[], Any], process: Any, log: Path) -> Any:
    deadline = time.monotonic() + 240
    while not (found := look()):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers(pid: int) -> list[int]:
    return [below for below in descendants(pid) if "RayTrainWorker" in name_of(below)]


def test_workers_are_forked_and_each_second_of_a_start_has_a_name(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    env, log, folder = environment(tmp_path / "home"), tmp_path / "log", RunFolder(str(tmp_path), "run")
    process = start_job(*OPTIONS, "--name", "run", "--storage", str(tmp_path), env=env, log=log)
    below: list[int] = []
    try:
        began = time.time()
        start = awaited(lambda: event(folder, "start"), process, log)
        phases = start["phases"]
        assert [*phases][:6] == [*OF_DRIVER, *OF_WORKER[:2]] and [*phases][-2:] == OF_WORKER[-2:]
        assert sum(phases.values()) == pytest.approx(start["time"] - began, abs=1.0)
        awaited(lambda: committed(folder) >= 10, process, log)
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), "the driver has imported it"
        servers = {parent(each) for each in workers(process.pid)}
        (server,) = servers
        assert "fork_server.py" in name_of(server)
        folders = {str(Path(f"/proc/{each}/cwd").readlink()) for each in workers(process.pid)}
        assert folders == {f"{env['XDG_CACHE_HOME']}/raydali/working_folder"}
        killed = time.time()
        kill(workers(process.pid)[:1])
        resume = awaited(lambda: event(folder, "resume"), process, log)
        assert [*resume["phases"]] == OF_WORKER
        # When a process has begun is known to a second, as the time of the last boot is.
        assert 0 < sum(resume["phases"].values()) < resume["time"] - killed + 1.0
        assert {parent(each) for each in workers(process.pid)} == servers
        print(f"start {phases}; next step {resume['time'] - killed:.1f} s after the kill: {resume['phases']}")
        below = descendants(process.pid)
        process.terminate()
        assert process.wait(120) == 130
        assert wait_until_gone(below, timeout=30) == []
    finally:
        kill([*descendants(process.pid), process.pid, *below])
        process.wait()


def test_on_a_cluster_the_nodes_keep_servers_for_later_runs(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    servers: set[int] = set()
    with nodes(environment(tmp_path / "home"), tmp_path / "nodes", ["8"], ["8"]) as (env, _):
        for name in ("first", "second"):
            log, folder, began = tmp_path / "log", RunFolder(str(tmp_path), name), time.time()
            options = [*OPTIONS, "--cpus-per-worker", "8", "--name", name, "--storage", str(tmp_path)]
            process = start_job(*options, env=env, log=log)
            try:
                start = awaited(partial(event, folder, "start"), process, log)
                print(f"the {name} run's first step after {start['time'] - began:.1f} s: {start['phases']}")
                found = workers(os.getpid())
                assert len(found) == len({parent(each) for each in found}) == 2
                assert name == "first" or {parent(each) for each in found} == servers
                servers = {parent(each) for each in found}
                assert all("fork_server.py" in name_of(each) for each in servers)
                assert all("raylet/raylet" in name_of(parent(each)) for each in servers)
                assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text(), "the driver has imported it"
                process.terminate()
                assert process.wait(120) == 130
                assert wait_until_gone(found, timeout=30) == []
            finally:
                kill([*descendants(process.pid), process.pid])
                process.wait()
    assert wait_until_gone([*servers], timeout=30) == []
