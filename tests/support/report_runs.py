"""Made-up runs, for tests of report.html."""

import json
from dataclasses import asdict
from typing import Any

from raydali.run.folder import FORM, RunFolder
from tests.support.records import rank_record

BEGUN = 1_790_000_000.0


def record(epoch: int, *, ranks: int = 2, **changes: Any) -> dict[str, Any]:
    """A line of `epochs.jsonl`, whole and plausible."""
    of_ranks = [
        rank_record(
            rank,
            ranks,
            images=100,
            loss_sum=50.0,
            seconds=2.0,
            loader_wait_seconds=0.2 + 0.1 * (rank == 1),
            step_seconds=1.5,
            checkpoint_seconds=0.1,
        )
        for rank in range(ranks)
    ]
    return {
        "epoch": epoch,
        "step": 10 * (epoch + 1),
        "samples_consumed": 100 * ranks * (epoch + 1),
        "world_size": ranks,
        "images": 100 * ranks,
        "seconds": 2.0,
        "images_per_second": 50.0 * ranks,
        "loader_wait_seconds": 0.25,
        "loader_wait_fraction": 0.125,
        "step_seconds": 1.5,
        "first_batch_seconds": None,
        "loader_images_per_second": None,
        "ceiling_images_per_second": 62.5 * ranks,
        "of_ceiling": 0.8,
        "loss": 2.0 / (1 + epoch),
        "learning_rate": 0.1,
        "validation": {"images": 36, "loss": 1.9 / (1 + epoch), "top1": 0.5, "top5": 0.9, "seconds": 0.5},
        "checkpoint_seconds": 0.1,
        "quarantined": 0,
        "verdict": None,
        "ranks": [asdict(each) for each in of_ranks],
    } | changes


def start(after: float, *, step: int = 0, world_size: int = 2, seconds: float | None = None, **facts: Any) -> Any:
    """The event of a start, or of a resume where the step is not 0."""
    return {
        "time": BEGUN + after,
        "event": "resume" if step else "start",
        "step": step,
        "steps": 100,
        "world_size": world_size,
        "device": "cpu",
        "seconds": after if seconds is None else seconds,
    } | facts


def event(kind: str, after: float, **facts: Any) -> dict[str, Any]:
    """Another event."""
    return {"time": BEGUN + after, "event": kind, **facts}


def write(folder: RunFolder, records: list[Any], events: list[Any], **settings: Any) -> None:
    """Write the files of a run."""
    folder.write_json("config.json", {"form": FORM, "epochs": 10, "model": "resnet18", "name": folder.name} | settings)
    for file, rows in (("epochs.jsonl", records), ("events.jsonl", events)):
        if rows:
            folder.write(file, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
