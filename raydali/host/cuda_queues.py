"""The hardware queues of a GPU: if there are too few, independent streams wait for each other.

By default, CUDA distributes the streams of a process over 8 queues. DALI's JPEG decoder alone has more streams. If one
of them shares a queue with the training step, its images wait until the step has ended. docs/performance.md has the
measurements.
"""

import os
import warnings

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
HARDWARE_QUEUES = 32
"""CUDA's maximum number of hardware queues."""


def set_max_connections() -> None:
    """Request all queues. Warn if this process already uses CUDA: then it is too late."""
    import torch

    if os.environ.get(VARIABLE) == str(HARDWARE_QUEUES):
        return
    if torch.cuda.is_initialized():
        warnings.warn(
            f"CUDA was initialized before raydali could set {VARIABLE} (now {os.environ.get(VARIABLE, 'unset')}), so "
            f"decoding waits for training: set {VARIABLE}={HARDWARE_QUEUES} in the environment",
            stacklevel=3,
        )
        return
    os.environ[VARIABLE] = str(HARDWARE_QUEUES)
