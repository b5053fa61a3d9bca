"""TensorBoard's files, on a local disk and in S3; their messages are read by tensorboardX's own definitions."""

import struct
from typing import Any

import pytest
from tensorboardX.record_writer import masked_crc32c

from raydali.report.tensorboard import FOLDER, TensorBoard, events_of, scalars
from raydali.run.folder import RunFolder


def row(epoch: int, **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "step": (epoch + 1) * 10, "loss": 1.0 / (epoch + 1), **more}


def steps(folder: RunFolder) -> list[int]:
    """The steps that TensorBoard shows, in the order of its files.

    As its `_CheckForRestartAndMaybePurge` has it: the start of a session (status 1) purges this and later steps.
    """
    shown = list[int]()
    for file in folder.files(FOLDER):
        for event in events_of(folder.read(f"{FOLDER}/{file}")):
            if event.session_log.status == 1:
                shown = [step for step in shown if step < event.step]
            shown += [event.step] * bool(event.summary.value)
    return shown


def start(folder: RunFolder, *epochs: int) -> None:
    board = TensorBoard(folder)
    for epoch in epochs:
        folder.append("epochs.jsonl", row(epoch))
        board.epoch(row(epoch))


def test_each_start_adds_a_file_that_goes_on(folder: RunFolder) -> None:
    start(folder, 0, 1)
    start(folder, 2)
    assert len(folder.files(FOLDER)) == 2
    assert steps(folder) == [10, 20, 30]
    for file in folder.files(FOLDER):
        first, *_ = events_of(folder.read(f"{FOLDER}/{file}"))
        assert first.file_version == "brain.Event:2" and "tfevents" in file


def test_a_class_of_any_name_has_a_figure(folder: RunFolder) -> None:
    TensorBoard(folder).epoch(row(0) | {"validation": {"iou \udcff\x1b": 0.5}})
    (file,) = folder.files(FOLDER)
    tags = {value.tag for event in events_of(folder.read(f"{FOLDER}/{file}")) for value in event.summary.value}
    assert r"validation/iou \xff\x1b" in tags


def test_an_epoch_that_a_dead_driver_missed_is_written_later(folder: RunFolder) -> None:
    start(folder, 0)
    folder.append("epochs.jsonl", row(1))
    start(folder, 2, 3)
    assert steps(folder) == [10, 20, 30, 40]


def test_an_epoch_that_is_trained_again_is_written_again(folder: RunFolder) -> None:
    start(folder, 0, 1)
    folder.keep_rows("epochs.jsonl", lambda kept: kept["epoch"] == 0)
    start(folder, 1)
    assert steps(folder) == [10, 20]


def test_a_resume_from_an_older_checkpoint_shows_each_step_once(folder: RunFolder) -> None:
    start(folder, 0, 1, 2, 3)
    start(folder, 1)  # from the checkpoint of the first epoch; the driver dies after the next epoch's row
    folder.keep_rows("epochs.jsonl", lambda kept: kept["epoch"] < 2)
    folder.append("epochs.jsonl", row(2))
    start(folder, 3)
    assert steps(folder) == [10, 20, 30, 40]


def test_an_epoch_that_restarted_workers_train_again_is_shown_once(folder: RunFolder) -> None:
    start(folder, 0, 1, 2, 1, 2, 3)
    assert steps(folder) == [10, 20, 30, 40]


def test_records_are_framed_as_tfrecord_files_are(folder: RunFolder) -> None:
    start(folder, 0, 1)
    contents, at, messages = folder.read(f"{FOLDER}/{folder.files(FOLDER)[0]}"), 0, 0
    while at < len(contents):
        length, of_length = struct.unpack_from("<QI", contents, at)
        message = contents[at + 12 : at + 12 + length]
        assert of_length == masked_crc32c(contents[at : at + 8])
        assert struct.unpack_from("<I", contents, at + 12 + length) == (masked_crc32c(message),)
        at, messages = at + 16 + length, messages + 1
    assert (at, messages) == (len(contents), 4)
    assert [event.step for event in events_of(contents[:-1])] == [0, 10, 10], (
        "a last one that was cut short is left out"
    )


def test_a_line_becomes_numbers_by_name() -> None:
    line = row(
        3, learning_rate=0.1, of_ceiling=None, images_per_second=float("nan"), ranks=[{"rank": 0}], quarantined=0
    )
    line["validation"] = {"images": 5, "top1": 0.5, "per_class": [1, 2], "exact": True}
    assert scalars(line) == {
        "train/loss": pytest.approx(0.25),
        "train/learning_rate": 0.1,
        "run/epoch": 3.0,
        "validation/images": 5.0,
        "validation/top1": 0.5,
    }
    assert scalars({"validation": None}) == {}
