"""How long a rank that has all its gradients of a step waits for the others'."""

import time

import torch
from torch import nn
from torch.autograd import Variable

from raydali.measure.meter import EpochMeter

SAMPLE_SECONDS = 2.0
"""Between two looks at a captured exchange; each lets the host wait for the device once."""


class AllReduceTimer:
    """Times exchanges of gradients, as DistributedDataParallel has them at the end of a backward pass.

    A step that is launched kernel by kernel is a stage of the meter's clock, each time. Inside a CUDA graph stand two
    events, which every replay records anew: their distance is looked at now and then.

    Args:
        model: of its parameters the first one that is trained gets its gradient last.
    """

    def __init__(self, model: nn.Module) -> None:
        first = next((parameter for parameter in model.parameters() if parameter.requires_grad), None)
        if first is not None:
            first.register_post_accumulate_grad_hook(self._has_gradients)
        self._meter: EpochMeter | None = None
        self._captured: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._look_at = 0.0

    def expect(self, meter: EpochMeter | None) -> None:
        """Say who measures the micro-batch that comes; None where it is not the last one of its step."""
        self._meter = meter

    def sample(self, meter: EpochMeter) -> None:
        """Between two steps: tell what the captured exchange of the step before took, if it is time for that."""
        if self._captured is None or not meter.steps or time.monotonic() < self._look_at:
            return
        self._look_at = time.monotonic() + SAMPLE_SECONDS
        begun, ended = self._captured
        ended.synchronize()
        meter.sample_exchange(begun.elapsed_time(ended) / 1000)

    def _has_gradients(self, gradient: torch.Tensor) -> None:
        if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
            self._capture()
            return
        self._captured = None  # the capture has failed
        if self._meter is not None:
            self._meter.exchange()
            self._meter = None

    def _capture(self) -> None:
        begun, ended = (torch.cuda.Event(enable_timing=True, external=True) for _ in range(2))
        begun.record()
        queue = Variable._execution_engine.queue_callback

        # DDP makes the stream wait for its exchange in such a callback too, which this pass has yet to queue.
        queue(lambda: queue(ended.record))
        self._captured = begun, ended
