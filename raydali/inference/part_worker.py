"""Lets the evaluation of a job, which sums over ranks at its end, run part by part on any number of workers.

    worker    evaluate(batches of part 0): its calls of `sum`, `gather_bytes`, ... are recorded
    worker    evaluate(batches of part 1): recorded
    driver    evaluate(no batches): each call returns what it would if each part were a further rank

An evaluation communicates only at its end, since ranks get unequal numbers of batches, or none. So the driver may be
such a rank. Sums are added in the order of the parts, and do not depend on the number of workers.
"""

from collections.abc import Sequence
from typing import Any

import torch

from raydali.errors import UsageError
from raydali.train.worker import Worker

Calls = list[Any]
"""The values that a part gave, call by call: a tensor on the CPU for a sum, else bytes or a JSON value."""


class PartWorker(Worker):
    """The only rank of a part; it records what it gives in `calls`."""

    def __init__(self, device: torch.device, cpus: int = 1) -> None:
        super().__init__(rank=0, world_size=1, device=device, cpus=cpus, node="")
        self.calls: Calls = []

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Worker`."""
        return self._recorded(super().sum(tensor)).clone()  # type: ignore[no-any-return]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """See `Worker`."""
        return [self._recorded(content)]

    def exchange(self, value: object) -> list[Any]:
        """See `Worker`."""
        return [self._recorded(value)]

    def _recorded(self, value: Any) -> Any:  # noqa: ANN401 (what the caller gives)
        self.calls.append(value)
        return value


class JoiningWorker(Worker):
    """Rank 0 without batches; the other ranks are parts that have given their values.

    Args:
        parts: of each part its calls.
    """

    def __init__(self, parts: Sequence[Calls]) -> None:
        super().__init__(rank=0, world_size=1, device=torch.device("cpu"), cpus=1, node="")
        if len({*map(len, parts)}) > 1:
            raise UsageError(
                "the job's evaluate() calls worker.sum or the like more often for some samples than for others: call "
                "them at its end, equally often on each rank"
            )
        self._calls = list(map(list, zip(*parts, strict=True)))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Worker`."""
        return torch.stack([super().sum(tensor), *self._calls.pop(0)]).sum(0)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """See `Worker`."""
        return [content, *self._calls.pop(0)]

    def exchange(self, value: object) -> list[Any]:
        """See `Worker`."""
        return [value, *self._calls.pop(0)]
