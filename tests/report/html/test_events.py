"""Each event of a run is a sentence in report.html."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from raydali.report.html.event_table import event, event_table
from raydali.run.events import (
    BadLoss,
    CeilingMeasured,
    CheckpointFailed,
    CheckpointRefused,
    Event,
    Failure,
    FirstCheckpoint,
    GroupEnded,
    Hang,
    Left,
    OptionsChosen,
    Preemption,
    Quarantined,
    RanksDiffer,
    Rehearsed,
    Resize,
    Resumed,
    RunEndedEarly,
    RunFinished,
    RunInterrupted,
    RunStopped,
    SettingsChanged,
    SizesRehearsed,
    Started,
    StorageRetried,
    StuckRank,
)
from tests.support.report_pages import history

PHASES = {"worker start": 0.5, "first step": 1.25}
WHERE: dict[str, Any] = {"step": 40, "steps": 400, "world_size": 2, "device": "cpu", "phases": PHASES}
STUCK = StuckRank(rank=1, node="ab12cd34", node_id="ab" * 28, pid=77, started=1, frozen=False, stack="File 'a_b.py'")
EVENTS: list[tuple[Event, list[str]]] = [
    (Started(**WHERE), ["started", "40", "400", "2 workers", "cpu", "worker start 0.5 s"]),
    (Resumed(**WHERE), ["resumed", "40", "400", "2 workers", "cpu", "first step 1.2 s"]),
    (OptionsChosen(options={"precision": "bf16", "compile": True}), ["--precision bf16", "--compile yes"]),
    (Rehearsed(ceiling_images_per_second=250, rehearsal_seconds=3), ["250 images/s", "3 s"]),
    (CeilingMeasured(ceiling_images_per_second=250, rehearsal_seconds=3), ["250 images/s", "again"]),
    (Quarantined(of="training", id=7, path="a.jpg", reason="is cut", replaced_by=8), ["training", "7", "a.jpg", "cut"]),
    (
        StorageRetried(path="s3://a", reason="refused", waited_seconds=61.503456, ranks=[0, 1]),
        ["s3://a", "61.5 s", "refused"],
    ),
    (
        BadLoss(
            step=40,
            why="its loss is nan",
            loss=float("nan"),
            gradient_norm=1.0,
            left_out=True,
            checkpoint=32,
            command="raydali replay r",
        ),
        ["40", "nan", "left out: yes", "raydali replay r"],
    ),
    (FirstCheckpoint(step=40), ["first checkpoint", "40"]),
    (CheckpointFailed(step=40, path="/run/a", reason="disk full", in_a_row=2), ["/run/a", "disk full"]),
    (CheckpointRefused(path="/run/a", reason="is cut"), ["/run/a", "is cut"]),
    (RanksDiffer(step=40, checksums=[1, 2], ranks=["a", "b"], odd=[1], text="b is wrong"), ["b is wrong"]),
    (Left(notice="stop", step=40), ["40", "interrupted"]),
    (Left(notice="preemption", step=40), ["40", "node"]),
    (Left(notice="resize", step=40), ["40", "size"]),
    (Failure(ranks=[1], killed=[1], error="it died", pause=15, left_out=["ab12"]), ["rank 1", "it died", "ab12", "15"]),
    (Failure(ranks=[0, 1], killed=[], error="it died"), ["ranks 0, 1 failed"]),
    (Failure(ranks=[], killed=[], error="it died", starting=True), ["start", "it died"]),
    (Preemption(ranks=[1], error="left after a checkpoint"), ["node", "left after a checkpoint"]),
    (Resize(workers=3), ["3"]),
    (Hang(starting=False, ranks=[STUCK]), ["progress", "rank 1", "ab12cd34", "77"]),
    (Hang(starting=True, ranks=[STUCK]), ["first step", "rank 1"]),
    (SettingsChanged(changed={"val_data": (None, "/val")}), ["--val-data", "/val"]),
    (RunFinished(), ["finished"]),
    (RunEndedEarly(why="no better score for 3 validations"), ["ended early", "no better score for 3 validations"]),
    (RunStopped(error="it died", why="--max-failures is 0"), ["error", "it died"]),
    (RunInterrupted(why="interrupted, as asked"), ["interrupted, as asked"]),
]


def kinds(above: type[Event] = Event) -> Iterator[type[Event]]:
    for kind in above.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_all_events_are_here() -> None:
    of_short_runs = {SizesRehearsed}  # which have no report
    assert {type(each) for each, _ in EVENTS} == {*kinds()} - {GroupEnded} - of_short_runs


@pytest.mark.parametrize(("made", "said"), EVENTS, ids=lambda each: type(each).__name__)
def test_an_event_is_a_sentence(made: Event, said: list[str]) -> None:
    row = json.loads(json.dumps({"time": 1.7e9, **made.row(), "seconds": 12.0}))
    (shown,) = event_table(history([], [row])).rows
    text = str(shown)
    assert [each for each in said if each not in text] == []
    assert not re.search(r"[{}\[\]'\"]|\w_\w|None|True|False", event(row, None)), event(row, None)


def test_an_event_of_a_later_version_is_shown_by_its_facts() -> None:
    row = {"time": 1.7e9, "event": "eclipse", "of_node": "ab12", "ranks": [0], "phases": PHASES, "places": [{"a": 1}]}
    assert event(row, None) == "eclipse: of node ab12"
