"""Measures for how much of a step a GPU computes; otherwise it waits for the host, which launches its kernels."""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from raydali.measure.ceiling import synchronize

Step = TypeVar("Step")

STEPS = 3


def busy_seconds(take: Callable[[], Step], device: torch.device) -> Generator[Step, None, float]:
    """Measure for how long a GPU computes in a step, without its waits for other ranks.

    CUPTI observes the kernels. It makes launches slower, but not the kernels.

    Args:
        take: makes a step on a resident batch. STEPS of them are yielded, and the caller trains on each.
        device: the GPU.

    Returns:
        Seconds for each step; 0 if CUPTI may not observe this GPU.
    """
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            yield take()
        synchronize(device)
    on_gpu = (event for event in profiler.events() if event.device_type.name == "CUDA" and "nccl" not in event.name)
    return covered((event.time_range.start, event.time_range.end) for event in on_gpu) / 1e6 / STEPS


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each of which is a start and an end."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
