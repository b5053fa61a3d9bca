"""What people see: plain lines in a file, a pipe or a terminal, and never a crash over a missing value."""

import re
from typing import Any

import pytest

from raydali.report.console import Console
from raydali.run.events import (
    CheckpointFailed,
    CheckpointRefused,
    Event,
    Failure,
    OptionsChosen,
    RanksDiffer,
    Rehearsed,
    Resize,
    Resumed,
    RunFinished,
    Started,
    StorageRetried,
)
from raydali.run.messages import EpochEnded, Message, Note, RankWarning, WorkerError
from tests.support.console import CONTROL, RECORD, Output, progress
from tests.support.messages import mentions

EMPTY: dict[str, Any] = dict.fromkeys(RECORD) | {"epoch": 0, "images": 0, "seconds": 0.0}


def test_epochs_are_lines_of_a_table_that_nothing_wraps(output: Output) -> None:
    console = Console()
    console.show(EpochEnded(RECORD))
    console.show(EpochEnded(RECORD | {"epoch": 4}))
    text = output()
    heading, first, second = text.splitlines()
    assert heading.split() == [
        "epoch",
        "images",
        "images/s",
        "ceiling",
        "wait",
        "loss",
        "lr",
        "top-1",
        "top-5",
        "seconds",
    ]
    assert first.split() == ["3", "1281167", "6234", "91.3%", "1.2%", "2.7183", "0.05", "0.7613", "0.9287", "205.5"]
    assert second.split()[0] == "4"
    ends = [[match.end() for match in re.finditer(r"\S+", line)] for line in (heading, first)]
    assert ends[0] == ends[1], "headings stand above their columns"
    assert not CONTROL.search(text)


def test_the_utilisation_has_a_column_where_it_is_known(output: Output) -> None:
    Console().show(EpochEnded(RECORD | {"mfu": 0.3512}))
    heading, line = (each.split() for each in output().splitlines())
    assert line[heading.index("MFU")] == "35.1%"


def test_a_verdict_is_printed_once_per_cause(output: Output) -> None:
    console = Console()
    verdicts = [
        "step-bound: 97%",
        "step-bound: 96%",
        None,
        "step-bound: 97%",
        "loader-bound by storage: a",
        "step-bound: 97%",
    ]
    shown = []
    for verdict in verdicts:
        console.show(EpochEnded(RECORD | {"verdict": verdict}))
        shown.append([line.strip() for line in output().splitlines() if "bound" in line])
    assert shown == [["step-bound: 97%"], [], [], [], ["loader-bound by storage: a"], []]


def test_values_that_were_not_measured_are_dashes(output: Output) -> None:
    console = Console()
    console.show(EpochEnded(RECORD))
    output()
    console.show(EpochEnded(EMPTY))
    assert output().split() == ["0", "0", *["-"] * 7, "0.0"]
    for name in set(RECORD) - {"verdict", "validation"}:
        console.show(EpochEnded(RECORD | {name: None}))
        assert output().split().count("-") == 1
    console.show(EpochEnded(RECORD | {"validation": None}))
    assert output().split()[-3:] == ["-", "-", "205.5"]


def test_figures_of_a_job_of_ones_own_have_their_names(output: Output) -> None:
    validation = {"images": 24, "iou": 0.75, "pixel_accuracy": 0.9, "per_class": [0.7, 0.8], "broken": 0}
    Console().show(EpochEnded(RECORD | {"validation": validation}))
    heading, line = output().splitlines()
    assert heading.split()[-4:] == ["lr", "iou", "pixel_accuracy", "seconds"] and len(heading) == len(line)
    assert line.split()[-3:] == ["0.7500", "0.9000", "205.5"]


def test_a_loss_that_is_no_number_any_more_is_shown_as_it_is(output: Output) -> None:
    Console().show(EpochEnded(RECORD | {"loss": float("nan")}))
    assert output().splitlines()[1].split()[5] == "nan"


@pytest.mark.parametrize(
    ("message", "values"),
    [
        (
            Started(step=0, steps=400, world_size=2, device="cpu", seconds=31.7),
            "0 400 workers cpu 32",
        ),
        (
            Resumed(step=40, steps=400, world_size=3, device="cuda", seconds=9.2),
            "40 400 workers cuda 9",
        ),
        (
            Failure(ranks=[1, 3], killed=[], error="ValueError: [red]/data/:smile:.jpg[/red]" + "!" * 80),
            "warning: ranks 1 3 ValueError: [red]/data/:smile:.jpg[/red]" + "!" * 80,
        ),
        (
            CheckpointFailed(step=9, path="/runs/a/checkpoint_000000009", reason="No space left", in_a_row=1),
            "warning: /runs/a/checkpoint_000000009 No space left",
        ),
        (
            StorageRetried(path="/data", reason="Stale", waited_seconds=2.04, ranks=[0, 5]),
            "warning: /data Stale 2 ranks 2.0 s",
        ),
        (
            CheckpointRefused(path="/runs/a/checkpoint_000000009", reason="state.pt is missing"),
            "warning: /runs/a/checkpoint_000000009 state.pt is missing",
        ),
        (
            RanksDiffer(step=9, checksums=[1, 2], ranks=["a", "b"], odd=[1], recomputed=True, text="b was wrong"),
            "warning: b was wrong",
        ),
        (Resize(workers=1), "1 worker checkpoint"),
        (Resize(workers=3), "3 workers checkpoint"),
    ],
    ids=lambda value: value.event if isinstance(value, Event) else "",
)
def test_events_are_one_plain_line_each(output: Output, message: Event, values: str) -> None:
    Console().show(message)
    said = output()
    assert said.count("\n") == 1 and mentions(said, values)


def test_the_end_of_a_run_is_not_shown_by_its_event(output: Output) -> None:
    Console().show(RunFinished())
    assert output() == ""


def test_warnings_name_the_rank(output: Output) -> None:
    Console().show(RankWarning(2, "cannot decode [/x].jpg"))
    assert mentions(output(), "warning 2 [/x].jpg")


def test_names_are_no_commands_to_the_terminal(output: Output) -> None:
    Console().show(RankWarning(2, "cannot decode a\x1b[31m\udcff.jpg"))
    Console().print("two\nlines")
    said = output()
    assert r"a\x1b[31m\xff.jpg" in said and "\x1b" not in said and "two\nlines" in said


def test_messages_for_nobody_are_passed_over(output: Output) -> None:
    console = Console()
    console.show(WorkerError(rank=0, group="", step=0, node_id="", error="the driver raises it"))
    console.show(Message())
    console.show(progress(1, 32))
    console.close()
    assert output() == ""


@pytest.mark.parametrize("width", [140, 80, 70, 60])
@pytest.mark.parametrize(
    ("metrics", "headings", "left_out"),
    [
        (("top1", "top5"), "top-1 top-5", {70: ["images"], 60: ["images", "lr"]}),
        (("top1",), "top-1", {60: ["images"]}),
        (("psnr", "input_psnr", "ssim"), "psnr input ssim", {70: ["images", "lr"], 60: ["images", "lr", "input"]}),
        (("map", "map_50"), "mAP mAP@50", {70: ["images"], 60: ["images", "lr"]}),
        (("map", "accuracy"), "mAP accuracy", {70: ["images"], 60: ["images", "lr"]}),
    ],
)
def test_a_narrow_terminal_gets_fewer_columns(
    width: int,
    metrics: tuple[str, ...],
    headings: str,
    left_out: dict[int, list[str]],
    on_terminal: Output,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    Console().show(EpochEnded(RECORD | {"validation": dict.fromkeys(metrics, 0.7613)}))
    heading, line = on_terminal().splitlines()
    assert len(heading) == len(line) <= width and len(heading.split()) == len(line.split())
    every = f"epoch images images/s ceiling wait loss lr {headings} seconds".split()
    assert heading.split() == [name for name in every if name not in left_out.get(width, [])]


def test_slow_models_have_rates_other_than_zero(output: Output) -> None:
    console = Console()
    for rate in (0.0663, 9.94, 1234.5):
        console.show(Rehearsed(ceiling_images_per_second=rate, rehearsal_seconds=1.0))
    assert re.findall(r"ceiling: (\S+) images/s", output()) == ["0.066", "9.9", "1234"]
    console.show(EpochEnded(RECORD | {"images_per_second": 0.0663}))
    assert output().splitlines()[1].split()[2] == "0.066"


def test_what_is_chosen_and_rehearsed_is_said(output: Output) -> None:
    console = Console()
    console.show(OptionsChosen(options={"precision": "bf16", "compile": True}))
    console.show(OptionsChosen(options={"compile": False}))
    console.show(Note("rehearsing"))
    chosen, note = output().splitlines()
    assert mentions(chosen, "--precision bf16 --compile") and note == "rehearsing"
