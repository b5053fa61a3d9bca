"""What /proc says of cores, about processes that really compute."""

import multiprocessing
import time

import pytest

from raydali.measure.host import CpuTimes, cpu_times


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


def refuse(_: int) -> None:
    raise OSError("no such file")


def test_a_host_that_says_nothing_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydali.measure.host.os.sched_getaffinity", refuse)
    assert cpu_times() is None
