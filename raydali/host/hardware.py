"""The precision that a device computes fastest, and the length of runs from which compiling pays."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PrecisionName = Literal["bf16", "fp16", "fp32"]

COMPILE_PAYS_FROM = 10_000
"""Steps of a run on GPUs. torch.compile takes some 40 s; a step of ResNet-50 at batches of 256, which it makes 16 ms
shorter on an H200, has them back after 2,500, smaller ones later (docs/performance.md)."""
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def has_bf16(device: "torch.device") -> bool:
    """Return whether the device has units for bf16: GPUs of compute capability 8.0 or more, CPUs by their flags."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_capability(device) >= (8, 0)
    return not _BF16_FLAGS.isdisjoint(_cpu_flags())


def fastest_precision(device: str, *, bf16: bool) -> PrecisionName:
    """Return the fastest precision of a training step on this device.

    Args:
        device: its type, such as "cuda".
        bf16: whether it has units for that.
    """
    if bf16:
        return "bf16"
    return "fp16" if device == "cuda" else "fp32"


@cache
def _cpu_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """Return the CPU's flags as Linux lists them; none elsewhere."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))
