"""report.html while a run goes on: when it is written, and what happens where it cannot be."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydali.report.html import live
from raydali.report.html.history import History
from raydali.report.html.live import PAUSE_SECONDS, LiveReport
from raydali.report.html.text import last_and_best
from raydali.run.folder import RunFolder
from tests.support.messages import mentions
from tests.support.report_runs import event, record, start, write


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def refuse(*_: Any) -> None:
    pytest.fail("nothing was to be said")


def page_of(folder: RunFolder) -> str:
    return folder.read("report.html").decode()


@pytest.mark.parametrize("end", ["finish", "early end"])
def test_a_page_is_written_at_a_calm_rate_and_at_the_end(folder: RunFolder, clock: Clock, end: str) -> None:
    write(folder, [], [])
    report = LiveReport(folder, refuse, clock)
    report.poll()
    assert not folder.exists("report.html")
    report.event(start(3))
    report.poll()
    assert "0 of 10 epochs" in page_of(folder)
    assert 'data-reload="15"' in page_of(folder)
    for epoch in range(3):
        report.epoch(record(epoch))
        clock.now += PAUSE_SECONDS / 4
        report.poll()
    assert "0 of 10 epochs" in page_of(folder)
    clock.now += PAUSE_SECONDS / 4
    report.poll()
    assert "3 of 10 epochs" in page_of(folder)
    report.epoch(record(3))
    report.event(event(end, 20))
    assert "4 of 10 epochs" in page_of(folder) and 'data-reload="0"' in page_of(folder)


def test_the_best_epoch_is_that_of_the_end(folder: RunFolder, clock: Clock) -> None:
    write(folder, [], [])
    folder.write_json("model.json", {"best": None})
    report = LiveReport(folder, refuse, clock)
    report.epoch(record(0))
    assert last_and_best(report.history) is None
    folder.write_json("model.json", {"best": {"epoch": 0, "metric": "top1", "score": 0.5}})
    report.event(event("finish", 20))
    assert mentions(last_and_best(report.history) or "", "top1 0.5 0 best") and "the best" in page_of(folder)


@pytest.mark.parametrize(
    ("score", "scores"),
    [(0.5, "0.5 1 no better 0 best/"), (0.50004, "0.5 1 no better 0 best/"), (0.75, "0.5 1 0.75 0")],
)
def test_a_best_score_that_looks_like_the_last_is_no_second_score(folder: RunFolder, score: float, scores: str) -> None:
    write(folder, [record(0), record(1)], [])
    folder.write_json("model.json", {"best": {"epoch": 0, "metric": "top1", "score": score}})
    line = last_and_best(History.read(folder)) or ""
    assert mentions(line, f"top1 {scores}") and len(set(re.findall(r"top1 [\d.]+", line))) == line.count("top1")


def test_a_resume_goes_on_from_what_lies_there(folder: RunFolder, clock: Clock) -> None:
    write(folder, [record(epoch) for epoch in range(4)], [start(3), event("interrupt", 20)])
    folder.write("samples.png", b"no picture")
    report = LiveReport(folder, refuse, clock)
    report.event(start(60, step=20, world_size=1, seconds=10))
    report.epoch(record(2))
    report.poll()
    page = page_of(folder)
    assert "3 of 10 epochs" in page and "interrupted" in page and "1 worker on cpu" in page
    assert "samples.png cannot be read" in page


def test_pauses_grow_with_what_a_page_takes(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    pages = []

    def slow(*_: Any, **__: Any) -> bytes:
        pages.append(clock.now)
        clock.now += 2
        return b""

    monkeypatch.setattr(live, "run_page", slow)
    report = LiveReport(folder, refuse, clock)
    for _ in range(250):
        report.epoch(record(0))
        report.poll()
        clock.now += 1
    assert pages == [100, 202, 304]  # 2 s are 2% of 100 s


def gone(_: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write", write)


def broken(folder: RunFolder, _: pytest.MonkeyPatch) -> None:
    folder.write("epochs.jsonl", b"{\n{}\n")


def wrong(_: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(*_: Any, **__: Any) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(live, "run_page", page)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [(gone, "OSError: [Errno 28] No space left"), (broken, "line 1 is broken"), (wrong, "ZeroDivisionError")],
)
def test_what_goes_wrong_is_one_warning(
    spoil: Callable[..., None], said: str, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, warnings = RunFolder(str(tmp_path), "run"), list[str]()
    folder.create()
    spoil(folder, monkeypatch)
    report = LiveReport(folder, warnings.append, clock)
    for epoch in range(3):
        report.event(event("failure", 1, ranks=[0], error="x"))
        report.epoch(record(epoch))
        report.poll()
        clock.now += 2 * PAUSE_SECONDS
    report.event(event("finish", 9))
    (warning,) = warnings
    assert warning.startswith("report.html could not be written: ") and said in warning
