"""Warnings of workers: handed on once by each, said once by the driver."""

import logging
import re
import warnings
from pathlib import Path

import pytest

from raydali.launch.driver.recorder import GATHER_SECONDS, MAX_LINES, WorkerWarnings
from raydali.launch.worker.reporting import MAX_TEXTS, forwarded_warnings
from raydali.run.messages import MORE_WARNINGS, ForwardedWarning
from tests.support.messages import mentions


def test_warnings_and_logged_lines_are_handed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    in_log: list[object] = []
    monkeypatch.setattr(warnings, "showwarning", lambda *args: in_log.append(args))
    apart = logging.getLogger("tests.worker_warnings.apart")
    apart.propagate = False
    shows = warnings.showwarning
    with forwarded_warnings(sent.append):
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn("loss jumps", stacklevel=1)
            logging.warning("slow disk")
            logging.getLogger("my.job").error("no %s", "labels")
            logging.getLogger("my.job").info("nobody asked")
            apart.warning("recompiled")
        try:
            raise ValueError("3")
        except ValueError:
            logging.getLogger("my.job").exception("odd")
    logging.warning("too late")
    line = Path(__file__).read_text().partition('"loss')[0].count("\n") + 1
    assert sent == [
        f"UserWarning: loss jumps ({__file__}:{line})",
        "slow disk",
        "no labels (my.job)",
        "recompiled (tests.worker_warnings.apart)",
        "odd: ValueError: 3 (my.job)",
    ]
    assert len(in_log) == 3  # the log has it as often as it came
    assert warnings.showwarning is shows and not apart.handlers


def test_texts_without_end_come_to_one() -> None:
    sent: list[str] = []
    with forwarded_warnings(sent.append):
        for step in range(1000):
            logging.warning("step %d is odd", step)
    assert len(sent) == MAX_TEXTS + 1
    assert sent[-2:] == [f"step {MAX_TEXTS - 1} is odd", MORE_WARNINGS]


def test_the_driver_says_a_text_once_with_its_ranks() -> None:
    now = [0.0]
    merged = WorkerWarnings(lambda: now[0])
    for rank in (1, 0):
        merged.add(ForwardedWarning(rank, "slow disk"))
    assert merged.lines() == []
    now[0] += GATHER_SECONDS / 2
    merged.add(ForwardedWarning(3, "odd"))
    now[0] += GATHER_SECONDS / 2
    (line,) = merged.lines()
    assert mentions(line, "ranks 0 1 slow disk")
    merged.add(ForwardedWarning(2, "slow disk"))
    assert merged.lines(at_end=True) == ["rank 3: odd"]
    assert merged.lines(at_end=True) == []
    for rank in range(256):
        merged.add(ForwardedWarning(rank, "everywhere"))
    (line,) = merged.lines(at_end=True)
    assert re.findall(r"\d+", line) == [*"01234567", "248"] and line.endswith(": everywhere")


def test_lines_without_end_come_to_one() -> None:
    merged = WorkerWarnings()
    for rank in range(1000):
        merged.add(ForwardedWarning(rank, f"rank {rank} is odd"))
    lines = merged.lines(at_end=True)
    assert len(lines) == MAX_LINES + 1
    assert re.findall(r"\d+", lines[-1]) == [*map(str, range(100, 108)), "892"] and lines[-1].endswith(MORE_WARNINGS)
    merged.add(ForwardedWarning(0, "rank 0 is odd"))
    assert merged.lines(at_end=True) == []


def test_a_warning_that_cannot_be_handed_on_harms_nothing() -> None:
    def gone(_: str) -> None:
        raise ConnectionError

    with forwarded_warnings(gone):
        logging.warning("slow disk")
