"""Finds the steps whose loss or gradient is not finite, or whose loss jumps, and takes them back if asked to.

    micro-batch --> loss, added up on the device --> gradient norm --> update --> taken back (skip)
                                                                        |
    host: the losses of INTERVAL steps, one interval later  <-----------+

The host reads losses when the device has long finished them, so that no step waits. To take a step back, the device
judges its loss itself. Losses are means over the global batch, so all ranks judge alike.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from raydali.data.load.loader import Batch
from raydali.training.checkpoint_file import INTEGERS, Snapshot, tensors_in
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.worker import Worker

INTERVAL = 16
"""Steps whose losses are read together."""
WINDOW, LEAST = 64, 32
"""Number of losses by which a jump is judged, and the number below which none is."""
JUMP = 20.0
"""A loss jumps if it is further above the median than this many median absolute deviations, and than the median."""


class LossWindow:
    """The finite losses of the last WINDOW steps, on a device. Checkpoints have them."""

    def __init__(self, device: torch.device) -> None:
        self._losses, self._count = torch.zeros(WINDOW, dtype=torch.float64, device=device), 0

    def is_bad(self, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Return whether a step's loss or gradient norm is bad, a bool on the device, and add the loss."""
        known = self._losses[: min(self._count, WINDOW)]
        usual = _middle(known) if self._count else torch.zeros_like(loss)
        finite = loss.isfinite()
        bad = ~(finite & norm.isfinite())
        if self._count >= LEAST:
            bad |= loss > usual + torch.maximum(JUMP * _middle((known - usual).abs()), usual.abs())
        self._losses[self._count % WINDOW] = torch.where(finite, loss, usual)
        self._count += 1
        return bad

    def state_dict(self) -> dict[str, Any]:
        """Return the losses and the number of steps."""
        return {"losses": self._losses, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state that `state_dict` returned."""
        self._losses.copy_(state["losses"])
        self._count = state["count"]


class LossWatch:
    """Watches the losses of a run's steps, on one rank. All ranks must call the same methods at the same steps.

    Args:
        worker, precision: of the run.
        micro_batches: number of micro-batches in a global batch.
        reaction: the option `--on-bad-loss`.

    Attributes:
        window: the losses by which a jump is judged, a part of the run's state.
        skips: whether bad steps are taken back: weights, momenta, averages, and the buffers of modules. The device
            needs memory for a copy of them. Counts on the host go on: LAMB's steps, and those of an average's warm-up.
        needs_norm: whether gradients are judged, too, also where they are not clipped.
    """

    def __init__(self, worker: Worker, precision: Precision, *, micro_batches: int, reaction: str) -> None:
        self._worker, self._precision, self._share = worker, precision, 1 / micro_batches
        self.skips, self.needs_norm, self._has_norm = reaction == "skip", reaction != "warn", False
        self.window = LossWindow(worker.device if self.skips else torch.device("cpu"))
        self._kept: dict[torch.Tensor, torch.Tensor] = {}
        self._state: Callable[[], list[torch.Tensor]] = list
        self._sent: list[tuple[list[int], Snapshot]] = []
        self._begin_interval()

    def _begin_interval(self) -> None:
        self._steps: list[int] = []
        self._rows = torch.zeros(INTERVAL, 3, dtype=torch.float64, device=self._worker.device)  # loss, norm, bad

    def begin_step(self, step: int, parts: Iterable[object], loss_sum: torch.Tensor) -> None:
        """Keep the state before a step: the parts of the run, and the sum of the epoch's losses."""
        self._row = self._rows[len(self._steps)]
        self._steps.append(step)
        if self.skips:
            self._state = lambda: [loss_sum, *_tensors(parts, self._worker.device)]
            earlier = self._kept
            self._kept = {now: earlier[now] if now in earlier else torch.empty_like(now) for now in self._state()}
            for nows, kept in _bits(self._kept):
                torch._foreach_copy_(kept, nows)

    def after_backward(self, loss: torch.Tensor, batch: Batch, by: ForwardBackward, inputs: tuple[Any, ...]) -> None:  # noqa: ARG002
        """Add the loss of a micro-batch; a replay also takes the batch, and by what and of what it was computed."""
        self._row[0].add_(loss, alpha=self._share)

    def before_update(self, norm: torch.Tensor | None) -> None:
        """Judge the step by its losses and the norm before clipping, if known, which is the same on all ranks."""
        self._has_norm = norm is not None
        if norm is not None:
            self._row[1] = norm
        if self.skips:
            self._worker.all_reduce(self._row[:1])
            self._row[2] = self.window.is_bad(self._row[0], self._norm(self._row[1]))

    def after_update(self) -> None:
        """Take a bad step back."""
        if self.skips:
            self._kept |= {new: torch.zeros_like(new) for new in self._state() if new not in self._kept}
            for nows, kept in _bits(self._kept):
                # As integers, since a NaN times zero is NaN.
                torch._foreach_sub_(kept, nows)
                torch._foreach_mul_(kept, self._row[2].to(kept[0].dtype))
                torch._foreach_add_(nows, kept)
        if len(self._steps) == INTERVAL:
            self._send()

    def judged(self, *, wait: bool = False) -> Iterator[tuple[int, float, float | None, bool]]:
        """Yield the steps that are newly known, the same on all ranks; with `wait` all, for which it waits.

        A step is its number, the loss of its global batch, its gradient norm if that is known, and whether it is bad.
        """
        if wait and self._steps:
            self._send()
        ready, self._sent = (self._sent, []) if wait else (self._sent[:-1], self._sent[-1:])
        for steps, copied in ready:
            copied.wait()
            for step, (loss, norm, bad) in zip(steps, copied.state, strict=False):
                is_bad = bad if self.skips else self.window.is_bad(loss, self._norm(norm))
                yield step, loss.item(), norm.item() if self._has_norm else None, bool(is_bad)

    def _send(self) -> None:
        rows = self._rows
        if not self.skips:
            losses = rows[:, 0].contiguous()
            self._worker.all_reduce(losses)
            rows[:, 0] = losses
        on_host = torch.empty_like(rows, device="cpu", pin_memory=rows.is_cuda).copy_(rows, non_blocking=True)
        event = torch.cuda.current_stream().record_event(torch.cuda.Event()) if rows.is_cuda else None
        self._sent.append((self._steps, Snapshot(on_host, event)))
        self._begin_interval()

    def _norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Return the norm that is judged: where gradients are scaled, the scaler leaves out those that overflow."""
        return torch.zeros_like(norm) if self._precision.scaler.is_enabled() else norm


def _middle(values: torch.Tensor) -> torch.Tensor:
    return values.sort().values[len(values) // 2]


def _tensors(parts: Iterable[object], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules and optimizers that are on the device."""
    for part in parts:
        found: Iterable[torch.Tensor] = ()
        if isinstance(part, nn.Module):
            module = part.module if isinstance(part, AveragedModel) else part
            found = (*module.parameters(), *module.buffers())
        elif isinstance(part, Optimizer):
            found = tensors_in([*part.state.values()])
        yield from (tensor for tensor in found if tensor.device == device)


def _bits(kept: dict[torch.Tensor, torch.Tensor]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield the tensors and what is kept of them as integers of the same bits, by their size."""
    for size in {now.itemsize for now in kept}:
        pairs, integers = [pair for pair in kept.items() if pair[0].itemsize == size], INTEGERS[size]
        yield [now.detach().view(integers) for now, _ in pairs], [copy.view(integers) for _, copy in pairs]
