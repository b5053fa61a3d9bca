"""The fastest precision of a device, and the length of runs from which compilation saves time."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PrecisionName = Literal["bf16", "fp16", "fp32", "fp64"]

COMPILE_PAYS_FROM = 10_000
"""Minimum steps on GPUs. torch.compile takes about 40 s. It saves 16 ms in each step of ResNet-50 with batches
of 256 on an H200, so 2,500 steps are enough there; shorter steps save less (docs/performance.md)."""
OVERLAP_PAYS = frozenset({"cuda"})
"""Types of devices on which training is faster if the all-reduce of gradients overlaps with the backward pass."""
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def has_bf16(device: "torch.device") -> bool:
    """Return whether the device has bf16 units: GPUs from compute capability 8.0 on, and CPUs by their flags."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_capability(device) >= (8, 0)
    return not _BF16_FLAGS.isdisjoint(_cpu_flags())


def fastest_precision(device: str, *, bf16: bool) -> PrecisionName:
    """Return the fastest precision of a training step on this device.

    Args:
        device: the device's type, for example "cuda".
        bf16: whether the device has bf16 units.
    """
    if bf16:
        return "bf16"
    return "fp16" if device == "cuda" else "fp32"


@cache
def _cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return the CPU's flags as Linux lists them; an empty set on other systems."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))
