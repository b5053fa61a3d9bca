"""Mixed precision: which dtype the forward pass runs in, and whether gradients are scaled."""

from contextlib import AbstractContextManager
from typing import Literal

import torch

PrecisionName = Literal["bf16", "fp16", "fp32"]

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Precision:
    """`bf16` and `fp16` run the forward pass under autocast, `fp16` scales the loss; parameters stay float32.

    The scaler looks at gradients that are the same on all ranks, so all ranks skip the same steps.
    """

    def __init__(self, name: PrecisionName, device: torch.device) -> None:
        self.dtype = _DTYPES[name]
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        return torch.autocast(self._device.type, self.dtype, enabled=self.dtype != torch.float32)
