"""The phases of a start: in order, joined across processes, never negative, and told once."""

import time

import psutil
import pytest

from raydali.host import start_clock


@pytest.fixture(autouse=True)
def _no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_clock, "_marks", [])


def test_the_first_phase_begins_with_the_process() -> None:
    start_clock.mark("imports")
    start_clock.mark("index")
    lived = time.time() - psutil.Process().create_time()
    phases = start_clock.phases()
    assert [*phases] == ["imports", "index"]
    assert lived - 1 < phases["imports"] <= lived + 0.1 and phases["index"] < 1
    assert start_clock.phases() == {}


def test_what_the_process_did_as_another_command_is_no_part() -> None:
    begun = time.time() - 0.5
    start_clock.begin(begun)
    start_clock.mark("imports")
    assert 0.5 <= start_clock.phases()["imports"] <= round(time.time() - begun, 3)


def test_a_worker_continues_the_drivers_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = [("", 100.0), ("imports", 103.0), ("cluster", 105.0)]
    monkeypatch.setattr(start_clock, "_marks", [("", 109.0), ("worker start", 112.0), ("compile", 113.0)])
    start_clock.join(driver)
    for name, at in [("ceiling", 114.0), ("compile", 120.0)]:  # of another image size
        start_clock._marks.append((name, at))
    assert start_clock.phases() == {
        "imports": 3.0,
        "cluster": 2.0,
        "workers": 4.0,
        "worker start": 3.0,
        "compile": 7.0,
        "ceiling": 1.0,
    }


def test_a_process_that_waited_before_the_command_takes_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_clock, "_marks", [("", 50.0), ("worker start", 106.5)])
    start_clock.join([("", 100.0), ("imports", 105.0)])
    assert start_clock.phases() == {"imports": 5.0, "workers": 0.0, "worker start": 1.5}
