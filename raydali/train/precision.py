"""Mixed precision: the dtype of the forward pass, and the scaling of gradients."""

from contextlib import AbstractContextManager

import torch

from raydali.host.hardware import PrecisionName as PrecisionName
from raydali.host.hardware import fastest_precision, has_bf16

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


class Precision:
    """The precision of training: `bf16` and `fp16` use autocast, and `fp16` scales the loss.

    Parameters are float32, or float64 with `fp64`. In float32, runs that add in another order differ after some steps;
    in float64, only real differences remain.

    The scaler checks gradients that are equal on all ranks, so all ranks skip the same steps.

    Args:
        name: the precision, the same on all ranks; None for the device's fastest one.
    """

    def __init__(self, name: PrecisionName | None, device: torch.device) -> None:
        name = name or fastest_precision(device.type, bf16=has_bf16(device))
        self.dtype = _DTYPES[name]
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[None]:
        """The context of a forward pass."""
        return torch.autocast(self._device.type, self.dtype, enabled=self.dtype.itemsize == 2)

    @property
    def of_parameters(self) -> torch.dtype:
        """The dtype of parameters."""
        return torch.promote_types(self.dtype, torch.float32)
