"""The hardware queues of a GPU: with too few of them, streams wait for each other for no reason.

CUDA spreads a process's streams over 8 of them by default. DALI's JPEG decoder alone has more streams, and
a training step fills the queue it is in for as long as it lasts: whatever of the decoder's shares it waits that long,
with the images behind it. docs/performance.md has the measurements.
"""

import os
import warnings

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
HARDWARE_QUEUES = 32
"""The maximum of CUDA."""


def set_max_connections() -> None:
    """Request all queues; warns if CUDA is in use in this process already, which makes it too late."""
    import torch

    if os.environ.get(VARIABLE) == str(HARDWARE_QUEUES):
        return
    if torch.cuda.is_initialized():
        warnings.warn(
            f"{VARIABLE} is {os.environ.get(VARIABLE, 'unset')} and CUDA is initialized, so decoding waits for "
            f"training: set {VARIABLE}={HARDWARE_QUEUES} in the environment",
            stacklevel=3,
        )
        return
    os.environ[VARIABLE] = str(HARDWARE_QUEUES)
