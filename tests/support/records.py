"""Records as a rank and an epoch have them, to be changed as a test needs it."""

from collections.abc import Sequence
from typing import Any

from raydali.measure.records import RankRecord, epoch_record


def rank_record(rank: int = 0, world_size: int = 1, **measured: Any) -> RankRecord:
    """A rank's; all that is not given is zero, or was not measured."""
    times = ("seconds", "loader_wait_seconds", "step_seconds", "checkpoint_seconds")
    nothing = dict.fromkeys(times, 0.0) | {"node": "a", "images": 0, "loss_sum": 0.0, "first_batch_seconds": None}
    return RankRecord(rank=rank, world_size=world_size, **(nothing | measured))


def epoch_line(*segments: Sequence[RankRecord], **facts: Any) -> dict[str, Any]:
    """A line of `epochs.jsonl`, made of ranks' records; facts as `epoch_record` names them, the rest made up."""
    made_up: dict[str, Any] = {
        "epoch": 0,
        "step": 1,
        "samples_consumed": 1,
        "learning_rate": 0.1,
        "validation": None,
        "quarantined": 0,
        "ceiling_images_per_second": None,
    }
    return epoch_record(segments, **(made_up | facts))
