"""The time that a rank waits for an all-reduce after its last gradient of a step, or for shards of other ranks."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from raydali.measure.meter import EpochMeter

SAMPLE_SECONDS = 2.0
"""Interval between samples of an all-reduce in a CUDA graph; each sample synchronises with the device."""


class AllReduceTimer:
    """A timer of the all-reduce of gradients at the end of a backward pass.

    In an eager step the all-reduce is a stage of the meter's clock. A CUDA graph contains two events instead, which
    every replay records again. The time between them is sampled.

    Args:
        parameters: the trained parameters of a model; the first one gets its gradient last.
        in_pass: whether DistributedDataParallel waits for it in the backward pass; otherwise it follows, between
            calls of `begin` and `end`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, in_pass: bool) -> None:
        for first in parameters[:1] if in_pass else ():
            first.register_post_accumulate_grad_hook(lambda _: self.begin())
        self._in_pass, self._on_gpu = in_pass, any(parameter.is_cuda for parameter in parameters)
        self._meter: EpochMeter | None = None
        self._captured: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._look_at = 0.0

    def expect(self, meter: EpochMeter | None) -> None:
        """Set the meter for the next micro-batch; None unless the micro-batch is the last of its step."""
        self._meter = meter

    def sample(self, meter: EpochMeter) -> None:
        """Measure the all-reduce of the last captured step, every SAMPLE_SECONDS. Call between steps."""
        if self._captured is None or not meter.steps or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + SAMPLE_SECONDS
        begun, ended = self._captured
        ended.synchronize()
        meter.sample_exchange(begun.elapsed_time(ended) / 1000)

    def begin(self) -> None:
        """Note that this rank has all gradients of a micro-batch."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            self._capture()
            return
        self._captured = None  # the capture has failed
        if self._meter is not None:
            self._meter.exchange()
            self._meter = None

    def end(self) -> None:
        """Note the end of an all-reduce after the backward pass, in the CUDA graph that is being captured, if any."""
        if self._captured is not None and torch.cuda.is_current_stream_capturing():
            self._captured[1].record()

    def _capture(self) -> None:
        begun, ended = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        begun.record()
        if self._in_pass:
            # DDP waits for its all-reduce in a callback that is queued later in this pass. Queue ours after DDP's.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(ended.record))
        self._captured = begun, ended


class GatherTimer:
    """A timer of what a step of a sharded model waits for, every SAMPLE_SECONDS: whole weights and sums of gradients.

    FSDP2 waits for a unit's weights in hooks before its forward pass and of its output's gradient, and for the sum of
    gradients in an autograd node of its inputs. For units without such inputs, and for the sums that are not complete
    yet, it waits in a callback at the end of the backward pass. A CUDA graph contains events before and after each of
    these, which every replay records again.

    Args:
        units: the root and its other sharded modules; what FSDP2 registers there is between what this registers.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        for unit in units:
            ends = partial(self._expect_backward, is_root=unit is units[0])
            unit.register_forward_pre_hook(self._expect_weights, prepend=True)
            unit.register_forward_pre_hook(self._has_weights)
            unit.register_forward_hook(ends, prepend=True)
            unit.register_forward_hook(ends)
        self._on_gpu = next(units[0].parameters()).is_cuda  # then the device waits, otherwise the host
        self._notes, self._look_at = list[Any](), 0.0
        self._measures = self._is_captured = False

    def expect(self, meter: EpochMeter | None) -> None:
        """Measure the next micro-batch, if it is the last of its step (not None) and a sample is due."""
        self._measures = meter is not None and time.monotonic() >= self._look_at
        if not self._is_captured:
            self._notes.clear()

    def sample(self, meter: EpochMeter) -> None:
        """Give the meter what was measured in the previous step. Call between steps."""
        notes, self._measures = self._notes, False
        if not notes or not meter.steps or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + SAMPLE_SECONDS
        pairs = zip(notes[::2], notes[1::2], strict=True)
        if self._on_gpu:
            notes[-1].synchronize()
            meter.sample_exchange(sum(begun.elapsed_time(ended) for begun, ended in pairs) / 1000)
        else:
            meter.sample_exchange(sum(ended - begun for begun, ended in pairs))

    def forget(self) -> None:
        """Forget the events of a CUDA graph that is freed."""
        self._notes.clear()
        self._is_captured = False

    def _records(self) -> bool:
        """Return whether to record this forward pass and its backward pass, unlike the passes of a validation."""
        captures = self._on_gpu and torch.cuda.is_current_stream_capturing()
        if not torch.is_grad_enabled() or not (self._measures or captures):
            return False
        if self._is_captured != captures:
            self._notes.clear()
            self._is_captured = captures
        return True

    def _expect_weights(self, _module: nn.Module, _inputs: object) -> None:
        if self._records():
            self._note()

    def _has_weights(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not self._records():
            return
        self._note()
        nodes = [tensor.grad_fn for tensor in inputs if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None]
        for node in nodes[:1]:
            node.register_prehook(lambda _: self._note())
            node.register_hook(lambda *_: self._note())

    def _expect_backward(self, _module: nn.Module, _inputs: object, outputs: object, *, is_root: bool) -> None:
        def begin(_gradient: torch.Tensor) -> None:
            self._note()
            if is_root:
                Variable._execution_engine.queue_callback(self._note)

        if self._records():
            each = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
            for output in islice(each, 1):
                output.register_hook(begin)

    def _note(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True, external=self._is_captured)
            self._notes.append(torch.cuda.current_stream().record_event(event))
        else:
            self._notes.append(time.perf_counter())
