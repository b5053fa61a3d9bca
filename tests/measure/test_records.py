"""Epoch records against numbers worked out by hand, and against the names that other programs rely on."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from jobs.imagenet import Config
from raydali.measure.records import RankRecord, epoch_record, segment_of, share_of_ceiling
from raydali.options.every_job import TrainingOptions
from tests.support.messages import mentioning
from tests.support.records import rank_record

LINE = json.loads(
    """{"epoch": 0, "step": 40, "samples_consumed": 2560, "world_size": 2, "sharded_over": 1, "images": 2560,
     "seconds": 9.1, "images_per_second": 281.3, "loader_wait_seconds": 0.4, "loader_wait_fraction": 0.04,
     "step_seconds": 8.6, "first_batch_seconds": 0.3, "loader_images_per_second": 900.0,
     "ceiling_images_per_second": 290.0, "of_ceiling": 0.97, "gpu_busy": 0.9, "flops_per_image": 2.4e10, "mfu": 0.17,
     "loss": 1.2, "learning_rate": 0.1,
     "validation": {"images": 360, "loss": 0.4, "top1": 0.95, "top5": 1.0, "seconds": 0.8},
     "checkpoint_seconds": 0.1, "quarantined": 0, "left_out": 0, "storage": null, "cached": null,
     "verdict": "step-bound: ...",
     "costs": {"storage": 0.03},
     "ranks": [{"rank": 0, "node": "n", "images": 1280, "loader_wait_seconds": 0.2, "step_seconds": 4.3}]}"""
)

FACTS: dict[str, Any] = {
    "epoch": 3,
    "step": 40,
    "samples_consumed": 2560,
    "learning_rate": 0.1,
    "validation": LINE["validation"],
    "quarantined": 5,
    "ceiling_images_per_second": 40.0,
}


def two_then_three_workers() -> list[list[RankRecord]]:
    def measured(*values: Any) -> dict[str, Any]:
        names = ("images", "loss_sum", "seconds", "loader_wait_seconds", "step_seconds", "checkpoint_seconds")
        return dict(zip((*names, "first_batch_seconds"), values, strict=True))

    return [
        [
            rank_record(0, 2, **measured(100, 300.0, 10.0, 1.0, 8.0, 0.5, 0.75)),
            rank_record(1, 2, **measured(60, 100.0, 12.0, 4.0, 7.0, 0.25, 2.5)),
        ],
        [
            rank_record(0, 3, **measured(20, 30.0, 3.0, 0.25, 2.5, 0.0, None)),
            rank_record(1, 3, **measured(20, 40.0, 2.0, 0.75, 1.0, 0.0, 1.25)),
            rank_record(2, 3, **measured(40, 50.0, 1.0, 0.5, 0.25, 0.75, None)),
        ],
    ]


def test_a_row_says_over_how_many_workers_the_model_was_sharded() -> None:
    def over(**options: Any) -> int:
        ranks = [rank_record(rank, 4) for rank in range(4)]
        found: int = epoch_record([ranks], **FACTS, **options)["sharded_over"]
        return found

    assert over() == over(options=TrainingOptions()) == 1
    assert over(options=TrainingOptions(shard="all")) == 4 and over(options=TrainingOptions(shard=2)) == 2


def test_every_name_of_the_design_is_there_and_no_other() -> None:
    record = epoch_record([[rank_record(0, 1)]], **FACTS)
    assert list(record) == list(LINE)
    assert LINE["ranks"][0].keys() <= record["ranks"][0].keys()


def test_several_segments_of_several_ranks_merge() -> None:
    record = epoch_record(two_then_three_workers(), **FACTS)
    assert record["images"] == 100 + 60 + 20 + 20 + 40 == 240
    assert record["seconds"] == 12.0 + 3.0  # the slowest rank of each segment
    assert record["images_per_second"] == 240 / 15 == 16.0
    assert record["loader_wait_seconds"] == (1.0 + 4.0) / 2 + (0.25 + 0.75 + 0.5) / 3 == 3.0
    assert record["loader_wait_fraction"] == 3.0 / 15.0
    assert record["step_seconds"] == (8.0 + 7.0) / 2 + (2.5 + 1.0 + 0.25) / 3 == 8.75
    assert record["checkpoint_seconds"] == 0.75 / 2 + 0.75 / 3 == 0.625
    assert record["first_batch_seconds"] == 2.5  # of whom the others waited for
    assert record["loss"] == pytest.approx(520 / 240)  # each image counts alike, whichever rank had it
    assert record["world_size"] == 3  # the last one's
    assert [(rank["world_size"], rank["rank"]) for rank in record["ranks"]] == [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]
    assert record["ranks"][1]["step_seconds"] == 7.0


def test_what_another_version_has_measured_besides_is_passed_over() -> None:
    row = asdict(rank_record(images=60)) | {"images_of_all": 100, "loss_sum_of_all": 200.0}
    assert segment_of([row]) == [rank_record(images=60)]


def test_a_ceiling_holds_only_for_the_measured_workers() -> None:
    segment = [rank_record(0, 2, images=60, seconds=4.0), rank_record(1, 2, images=60, seconds=3.0)]
    assert epoch_record([segment], **FACTS)["of_ceiling"] == 30.0 / 40.0
    assert epoch_record([segment, segment], **FACTS)["of_ceiling"] == 30.0 / 40.0
    others = epoch_record([[rank_record(0, 1, images=60, seconds=4.0)], segment], **FACTS)
    assert others["ceiling_images_per_second"] is None and others["of_ceiling"] is None


def test_utilisation_is_of_all_devices_while_the_epoch_lasts() -> None:
    peaks = ((3e12, 3e12), (1e12, 1e12, 4e12))
    segments = [
        [replace(record, peak_flops=peak) for record, peak in zip(segment, of_segment, strict=True)]
        for segment, of_segment in zip(two_then_three_workers(), peaks, strict=True)
    ]
    line = epoch_record(segments, **FACTS, flops_per_image=9e10)
    assert line["flops_per_image"] == 9e10
    assert line["mfu"] == 240 * 9e10 / (12 * 6e12 + 3 * 6e12) == 0.24
    segments[1][2] = replace(segments[1][2], peak_flops=None)
    line = epoch_record(segments, **FACTS, flops_per_image=9e10)
    assert (line["flops_per_image"], line["mfu"]) == (9e10, None)


def test_what_was_not_measured_is_null() -> None:
    record = epoch_record(
        [[rank_record(0, 2), rank_record(1, 2)]], **FACTS | {"validation": None, "ceiling_images_per_second": None}
    )
    missing = {name for name, value in record.items() if value is None}
    never_yet = {"loader_images_per_second", "ceiling_images_per_second", "of_ceiling", "verdict", "costs"}
    never_yet |= {"gpu_busy", "flops_per_image", "mfu", "storage", "cached"}
    derived = {"images_per_second", "loader_wait_fraction", "loss", "first_batch_seconds", "validation"}
    assert missing == never_yet | derived
    assert (record["images"], record["seconds"], record["loader_wait_seconds"]) == (0, 0.0, 0.0)


def test_time_without_images_is_a_rate_of_zero() -> None:
    record = epoch_record([[rank_record(0, 1, seconds=4.0, loader_wait_seconds=4.0)]], **FACTS)
    assert (record["images_per_second"], record["loader_wait_fraction"], record["loss"]) == (0.0, 1.0, None)


def test_a_record_survives_json_and_its_ranks_can_be_read_back() -> None:
    segments = two_then_three_workers()
    record = epoch_record(segments, **FACTS)
    read = json.loads(json.dumps(record, allow_nan=False))
    assert read == record
    assert [RankRecord(**rank) for rank in read["ranks"]] == [rank for segment in segments for rank in segment]


def test_an_error_in_the_verdict_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("of nothing")

    monkeypatch.setattr("raydali.measure.records.verdict", broken)
    with pytest.warns(UserWarning, match=mentioning("verdict ZeroDivisionError")):
        line = epoch_record(two_then_three_workers(), **FACTS)
    assert line["verdict"] is None and line["costs"] is None and line["images"]


def test_reads_of_a_bucket_add_up_over_ranks() -> None:
    counts = {"requests": 10, "bytes": 900, "repeated": 1, "hits": 20, "peer_hits": 10, "damaged": 0}
    ranks = [rank_record(0, 2, storage=counts), rank_record(1, 2, storage=counts | {"requests": 30, "hits": 10})]
    record = epoch_record([ranks], **FACTS | {"options": Config(cache="/tmp/cache")})
    sums = {"requests": 40, "bytes": 1800, "repeated": 2, "hits": 30, "peer_hits": 20, "damaged": 0}
    assert record["storage"] == sums
    assert record["cached"] == 50 / 90
    assert epoch_record([ranks], **FACTS)["cached"] is None, "there is no cache"


def test_no_share_is_above_what_a_ceiling_allows() -> None:
    assert share_of_ceiling(95.0, 100.0) == 0.95
    assert share_of_ceiling(105.0, 100.0) == 1.0
    assert [share_of_ceiling(*values) for values in ((1152.9, 100.0), (None, 100.0), (100.0, None))] == [None] * 3
