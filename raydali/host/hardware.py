"""The fastest precision of a device, how long a run must be for compilation to pay, and the queues of a GPU."""

import os
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

PrecisionName = Literal["bf16", "fp16", "fp32", "fp64"]

COMPILE_PAYS_FROM = 10_000
"""Minimum steps on GPUs. torch.compile takes about 40 s. It saves 16 ms in each step of ResNet-50 with batches
of 256 on an H200, so 2,500 steps are enough there; shorter steps save less (docs/performance.md)."""
COMPILED_VALIDATION_PAYS_FROM = 3_000
"""Minimum batches of all validations of a run. To compile a validation took 7 to 31 s. Of the 6 ms that this and a CUDA
graph save in each batch of 256 images of ResNet-50 on an H200, compiling has at most 18 s in 3,000 batches."""
OVERLAP_PAYS = frozenset({"cuda"})
"""Types of devices on which training is faster if the all-reduce of gradients overlaps with the backward pass."""
HARDWARE_QUEUES = 32
"""CUDA's maximum number of hardware queues of a GPU."""
QUEUES_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


def has_bf16(device: "torch.device") -> bool:
    """Return whether the device has bf16 units: GPUs from compute capability 8.0 on, and CPUs by their flags."""
    if device.type == "cuda":
        import torch

        return torch.cuda.get_device_capability(device) >= (8, 0)
    return not _BF16_FLAGS.isdisjoint(cpu_facts().get("flags", "").split())


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
def cpu_facts(path: str = "/proc/cpuinfo") -> dict[str, str]:
    """Return the facts on a CPU, such as "model name" and "flags", as Linux lists them; empty on other systems."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines) if value}


def set_max_connections() -> None:
    """Request all hardware queues of GPUs. Warn if this process already uses CUDA: then it is too late.

    By default, CUDA distributes the streams of a process over 8 queues. DALI's JPEG decoder alone has more streams. If
    one of them shares a queue with the training step, its images wait until the step has ended. docs/performance.md has
    the measurements.
    """
    import torch

    now = os.environ.get(QUEUES_VARIABLE)
    if now == str(HARDWARE_QUEUES):
        return
    if torch.cuda.is_initialized():
        warnings.warn(
            f"CUDA was initialized before raydali could set {QUEUES_VARIABLE} (now {now or 'unset'}), so decoding "
            f"waits for training: set {QUEUES_VARIABLE}={HARDWARE_QUEUES} in the environment",
            stacklevel=3,
        )
        return
    os.environ[QUEUES_VARIABLE] = str(HARDWARE_QUEUES)
