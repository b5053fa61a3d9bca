"""What /proc says of cores, about processes that really compute."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from raydali.host.child import Child
from raydali.host.cpu_times import CpuTimes, cpu_times, start_ticks, usable_cores


def compute(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def taken(before: CpuTimes | None) -> CpuTimes:
    now = cpu_times()
    assert now is not None and before is not None
    return now - before


def test_own_computing_is_counted_and_sleep_is_not() -> None:
    before = cpu_times()
    compute(0.3)
    time.sleep(0.2)
    spent = taken(before)
    assert 0.29 < spent.own < 0.5
    assert spent.busy > 0.2, "the kernel counts in hundredths of a second"
    assert spent.helpers < 0.1


def test_children_are_helpers() -> None:
    child = multiprocessing.get_context("fork").Process(target=compute, args=(30,))
    child.start()
    before = cpu_times()
    time.sleep(1.0)
    spent = taken(before)
    child.kill()
    child.join()
    assert spent.own > 0.05 and spent.helpers + spent.helpers_queued > 0.5


def test_children_that_call_functions_are_helpers() -> None:
    child = Child("decoder")
    try:
        child.call(compute, 0.01)
        before = cpu_times()
        child.call(compute, 0.3)
        spent = taken(before)
    finally:
        child.close()
    assert spent.own > 0.29 and spent.helpers > 0.29
    assert taken(cpu_times()).own < 0.1


def refuse(_: int) -> None:
    raise OSError("no such file")


def test_a_host_that_says_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydali.host.cpu_times.os.sched_getaffinity", refuse)
    assert cpu_times() is None


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000"}, 2),
        ("0::/\n", {"cpu.max": "max 100000"}, 64),
        ("0::/pods/a/b\n", {"cpu.max": "max 100000", "pods/a/cpu.max": "400000 100000"}, 4),
        ("0::/outside/of/the/container\n", {"cpu.max": "50000 100000"}, 1),
        (
            "4:memory:/\n3:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "300000", "cpu/a/cpu.cfs_period_us": "100000"},
            3,
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        (None, {}, 64),
    ],
)
def test_a_containers_quota_limits_the_cores(
    groups: str | None, files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in ({"self": groups} if groups else {}).items():
        (tmp_path / name).write_text(text)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text + "\n")
    monkeypatch.setattr("raydali.host.cpu_times._PROC_CGROUP", str(tmp_path / "self"))
    monkeypatch.setattr("raydali.host.cpu_times._CGROUPS", str(tmp_path / "fs"))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    assert usable_cores() == expected


def test_a_start_time_is_of_a_living_process() -> None:
    assert start_ticks(os.getpid()) == start_ticks(os.getpid())
    assert start_ticks(2**22 + 1) is None
