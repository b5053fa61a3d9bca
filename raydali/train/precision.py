"""Mixed precision: which dtype the forward pass runs in, and whether gradients are scaled."""

from contextlib import AbstractContextManager

import torch

from raydali.host.hardware import PrecisionName as PrecisionName
from raydali.host.hardware import fastest_precision, has_bf16

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Precision:
    """`bf16` and `fp16` run the forward pass under autocast, `fp16` scales the loss; parameters stay float32.

    The scaler checks gradients that are the same on all ranks, so all ranks skip the same steps.

    Args:
        name: None for the fastest one of the device; in a run, all ranks must name the same.
    """

    def __init__(self, name: PrecisionName | None, device: torch.device) -> None:
        name = name or fastest_precision(device.type, bf16=has_bf16(device))
        self.dtype = _DTYPES[name]
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        return torch.autocast(self._device.type, self.dtype, enabled=self.dtype != torch.float32)
