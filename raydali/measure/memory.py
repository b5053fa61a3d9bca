"""The memory that training needs, and the largest micro-batch that fits."""

import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a plan needs this module before its run starts, which would be seconds later with PyTorch
    import torch

MARGIN = 0.08
"""Share of a GPU's memory that stays free: allocators fragment it, and images differ in size."""
OUT_OF_MEMORY = "does not fit into the GPU's memory"
"""A part of the error that names a micro-batch which is too large."""
ROUND = 8
"""Micro-batches are multiples of this number: tensor cores compute them faster."""


def memory_of(device: "torch.device") -> dict[str, int]:
    """Return the bytes that this process needs, between two steps.

    Returns:
        "peak": of PyTorch since the start, or of the whole process on a CPU. On a GPU also "held": of PyTorch between
        steps, which does not depend on the micro-batch; "others": of CUDA, DALI and other processes; and "total".
    """
    if device.type != "cuda":
        return {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return {
        "peak": torch.cuda.max_memory_allocated(device),
        "held": torch.cuda.memory_allocated(device),
        "others": max(0, total - free - torch.cuda.memory_reserved(device)),
        "total": total,
    }


def largest_batch(memory: Mapping[str, int], batch_size: int) -> int | None:
    """Return the largest micro-batch that fits, if each sample needs as much memory as now; None on a CPU."""
    if "total" not in memory or memory["peak"] <= memory["held"]:
        return None
    of_sample = (memory["peak"] - memory["held"]) / batch_size
    room = memory["total"] * (1 - MARGIN) - memory["others"] - memory["held"]
    fits = int(room / of_sample)
    return max(1, fits // ROUND * ROUND if fits > ROUND else fits)
