"""Trains steps of a run again in this process, by the job's own loop, and records what it saw in them.

The job's train() runs as on one worker, which takes all micro-batches of each step. Its session begins at a checkpoint,
has an empty folder of its own in place of the run's, and ends the loop after the last step.
"""

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from raydali.data.index.source import TrainAndVal, class_labels
from raydali.data.load.loader import Batch
from raydali.data.stream.stream import MicroBatch, Stream
from raydali.launch.worker.session import Session
from raydali.options.every_job import TrainingOptions
from raydali.run.folder import RunFolder
from raydali.training.bad_losses import LossWatch
from raydali.training.checkpoint_file import tensors_in
from raydali.training.forward_backward import ForwardBackward
from raydali.training.weights.matching import MatchedWeights
from raydali.training.worker import Worker

Row = dict[str, Any]
"""The facts of a step or of a micro-batch, by name."""


class _ReplayedError(Exception):
    """The last step is complete."""


def row_of(batch: MicroBatch, alone: list[float] | None = None) -> Row:
    """Return the row of a micro-batch, with one for each of its "samples", whose losses alone may be known."""
    keys = batch.draw_keys
    columns = {"id": batch.ids, "read": batch.read_ids, "epoch": batch.epochs, "repeat": keys >> 32, "key": keys}
    samples = pa.table(columns | {"loss": pa.nulls(len(keys)) if alone is None else alone}).to_pylist()
    return {"step": batch.step, "micro_batch": batch.index, "counts_to": batch.counts_to, "samples": samples}


class _Recorder(LossWatch):
    """Watches losses as the run does, and records these steps in rows."""

    def __init__(self, steps: range, rows: list[Row], *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.needs_norm = True
        self._wanted, self._of_steps, self._model = steps, rows, nn.Module()
        self._hooks: list[Any] = []
        self._buffers: list[torch.Tensor] = []

    def begin_step(self, step: int, parts: Iterable[object], loss_sum: torch.Tensor) -> None:
        super().begin_step(step, parts, loss_sum)
        if step in self._wanted:
            self._of_steps.append({"step": step, "gradients": {}, "activations": {}, "micro_batches": []})
            self._model = next(part for part in parts if isinstance(part, nn.Module))
            self._buffers = [buffer.clone() for buffer in self._model.buffers()]
            layers = [(name, layer) for name, layer in self._model.named_modules() if not [*layer.children()]]
            self._hooks = [layer.register_forward_hook(partial(self._computed, name)) for name, layer in layers]

    def _computed(self, name: str, _: nn.Module, __: Any, outputs: Any) -> None:  # noqa: ANN401 (a layer's)
        largest = self._of_steps[-1]["activations"]
        for tensor in tensors_in(outputs) if torch.is_grad_enabled() else ():
            if tensor.is_floating_point() and tensor.numel():
                largest[name] = float(np.maximum(largest.get(name, 0.0), tensor.detach().abs().max().item()))

    def after_backward(self, loss: torch.Tensor, batch: Batch, by: ForwardBackward, inputs: tuple[Any, ...]) -> None:
        super().after_backward(loss, batch, by, inputs)
        if self._hooks:
            alone = self._alone(by.loss, inputs, len(batch.ids))
            seen = {"loss": loss.item(), "inputs": inputs, "tensors": batch.tensors}
            self._of_steps[-1]["micro_batches"].append(row_of(batch.micro_batch, alone) | seen)

    def _alone(self, loss: Callable[..., torch.Tensor], inputs: tuple[Any, ...], count: int) -> list[float] | None:
        """Return the loss of each sample alone; None if the inputs are not one row for each sample.

        No layer depends on other samples or on random numbers, and buffers are those from before the step.
        """
        if not all(isinstance(each, torch.Tensor) and len(each) == count for each in inputs):
            return None
        buffers, modules = [*self._model.buffers()], self._model.modules()
        newest = [buffer.clone() for buffer in buffers]
        layers = [layer for layer in modules if isinstance(layer, _BatchNorm | _DropoutNd) and layer.training]
        for layer in layers:
            layer.eval()
        _load(buffers, self._buffers)
        with torch.no_grad(), self._precision.autocast():
            losses = [loss(*(each[place : place + 1] for each in inputs)).item() for place in range(count)]
        _load(buffers, newest)
        for layer in layers:
            layer.train()
        return losses

    def before_update(self, norm: torch.Tensor | None) -> None:
        super().before_update(norm)
        if self._hooks:
            assert norm is not None
            row, layers = self._of_steps[-1], defaultdict[str, list[torch.Tensor]](list)
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    layers[name.rpartition(".")[0]].append(parameter.grad)
            row["gradients"] = {name: nn.utils.get_total_norm(each).item() for name, each in layers.items()}
            row["gradient_norm"] = norm.item()
            row["loss"] = float(np.mean([each["loss"] for each in row["micro_batches"]]))
            while self._hooks:
                self._hooks.pop().remove()


def _load(buffers: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)


class _ReplaySession(Session):
    """The session of a replay: it talks to no driver, and ends the training loop after a number of steps."""

    end: int

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    commit = emit = notice = report_start = _nothing

    def report_progress(self, stream: Stream) -> None:  # noqa: ARG002
        if self.cursor.done == self.end:
            raise _ReplayedError


def replayed(
    train: Callable[..., None],
    config: TrainingOptions,
    data: TrainAndVal[Any],
    worker: Worker,
    steps: range,
    *,
    checkpoint: dict[str, Any] | None,
    weights: MatchedWeights | None,
) -> list[Row]:
    """Train from a checkpoint to the last of these steps, and return a row of each.

    It has the "loss", the "gradient_norm" before clipping, that of each layer in "gradients", the largest absolute
    output of each in "activations", and "micro_batches": see `row_of`, and "loss", "inputs" and "tensors" (the
    loader's). Losses of samples alone are without dropout, with BatchNorm's statistics from before the step. The
    checkpoint is what `CheckpointStore.newest` returns; without one, the run starts from the weights.
    """
    rows = list[Row]()
    with TemporaryDirectory() as scratch:
        folder = RunFolder(scratch, "replay")
        folder.create()
        session = _ReplaySession(worker, folder, *cast(Any, (None, None)), weights=lambda: weights)
        session.end, session.loss_watch = steps.stop, partial(_Recorder, steps, rows)
        session.checkpoints.newest = lambda: checkpoint  # type: ignore[method-assign]
        if config.class_sampling is not None:
            session.class_labels = class_labels(data.train)
        with suppress(_ReplayedError):
            train(config, data, session)
        gc.unfreeze()  # what the run froze: at the end of the process, libraries complain of objects that remain
    return rows
