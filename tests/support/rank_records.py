"""A rank's record of an epoch, as `epochs.jsonl` has it, with numbers that are easy to check."""

from typing import Any


def rank(group: str, *, rank: int = 0, size: int = 2, **changed: Any) -> dict[str, Any]:
    """A rank that trained on 500 images in 50 steps and 10 s, and waited for data for 2 s of them."""
    return {
        "rank": rank,
        "world_size": size,
        "node": "a",
        "images": 500,
        "seconds": 10.0,
        "loader_wait_seconds": 2.0,
        "step_seconds": 7.5,
        "checkpoint_seconds": 0.25,
        "first_batch_seconds": None,
        "device": "cuda",
        "peak_flops": 1e12,
        "steps": 50,
        "first_step_seconds": None,
        "exchange_seconds": None,
        "shortest_exchange_seconds": None,
        "loader_waits": {"storage": 1.0},
        "python_seconds": 0.0,
        "cpu_seconds": None,
        "cpu_queued_seconds": None,
        "helpers_seconds": None,
        "helpers_queued_seconds": None,
        "host_busy_seconds": None,
        "host_idle_seconds": None,
        "group": group,
    } | changed
