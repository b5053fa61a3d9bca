"""The numbers of a line of `epochs.jsonl`, named so that trackers group their charts."""

import math
from collections.abc import Mapping
from typing import Any

GROUPS = {
    "train": ("loss", "learning_rate"),
    "speed": (
        "images_per_second",
        "ceiling_images_per_second",
        "of_ceiling",
        "mfu",
        "loader_wait_fraction",
        "loader_images_per_second",
    ),
    "time": ("seconds", "loader_wait_seconds", "step_seconds", "first_batch_seconds", "checkpoint_seconds"),
    "run": ("epoch", "images", "samples_consumed", "world_size"),
}
"""Fields of the line by group; the numbers of its `validation` are a group too."""


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers by names such as "train/loss" and "validation/top1"."""
    named = {f"{group}/{name}": record.get(name) for group, names in GROUPS.items() for name in names}
    named |= {f"validation/{name}": value for name, value in (record.get("validation") or {}).items()}
    return {
        name: float(value)
        for name, value in named.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
