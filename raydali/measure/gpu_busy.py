"""Measures for how long a GPU computes; otherwise it waits for the host, which launches its kernels."""

from collections.abc import Iterable

from torch.profiler import profile


def busy_seconds(profiler: profile) -> float:
    """Return for how long a GPU computed while it was profiled, without its waits for other ranks.

    CUPTI observes the kernels; 0 if it may not observe this GPU. It makes launches slower, but not the kernels.
    """
    on_gpu = (event for event in profiler.events() if event.device_type.name == "CUDA" and "nccl" not in event.name)
    return covered((event.time_range.start, event.time_range.end) for event in on_gpu) / 1e6


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, each of which is a start and an end."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
