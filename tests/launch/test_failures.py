"""Which failures end a run."""

from typing import Any

from raydali.launch.failures import Failures


def error(text: str, step: int) -> dict[str, Any]:
    return {"error": text, "step": step, "rank": 0}


def event(*killed: int, text: str = "the worker died") -> dict[str, Any]:
    return {"killed": list(killed), "error": text, "ranks": [0]}


def test_an_error_that_recurs_at_the_same_step_ends_the_run() -> None:
    failures = Failures(limit=-1)
    assert failures.failed(event(), [error("CUDA out of memory: tried 20 MiB, 1.5 GiB free", 41)], step=40) is None
    failures.begun(20)
    why = failures.failed(event(), [error("CUDA out of memory: tried 24 MiB, 0.9 GiB free", 41)], step=39)
    assert why is not None and "behind step 41" in why and "2 times" in why


def test_an_import_error_ends_the_run_the_second_time() -> None:
    failures = Failures(limit=10)
    assert failures.failed(event(), [error("ModuleNotFoundError: No module named 'x'", 0)], step=0) is None
    assert failures.failed(event(), [error("ModuleNotFoundError: No module named 'x'", 0)], step=0) is not None


def test_errors_at_other_steps_are_other_errors() -> None:
    failures = Failures(limit=-1)
    for step in range(1, 30):
        assert failures.failed(event(), [error("connection reset", step)], step=step) is None


def test_processes_killed_from_outside_may_meet_the_same_step_twice() -> None:
    failures = Failures(limit=-1)
    echo = [error("connection closed by peer", 7)]
    assert failures.failed(event(1), echo, step=7) is None
    assert failures.failed(event(1), [], step=7) is None
    assert failures.failed(event(1), [], step=7) is not None  # the host's memory runs out there, most likely


def test_failures_count_while_the_run_gets_no_further() -> None:
    failures = Failures(limit=2)
    for step in (10, 20, 30, 40):
        failures.begun(step)
        assert failures.failed(event(0), [], step=step + 1) is None
        failures.begun(step)
        assert failures.failed(event(0), [], step=step + 2) is None
    why = failures.failed(event(0), [], step=43)
    assert why is not None and "3 failures in a row" in why and "beyond step 40" in why and "--max-failures is 2" in why


def test_no_failure_may_be_allowed() -> None:
    assert Failures(limit=0).failed(event(0), [], step=3) == "--max-failures is 0"
