"""Forward and backward of a micro-batch; on a GPU one CUDA graph, so that no kernel waits for the host."""

import logging
from collections.abc import Callable

import torch
from torch import nn

from raydali.train.precision import Precision
from raydali.train.worker import Worker

WARM_UP_STEPS = 11
"""Until the capture: what compiles, tunes itself or measures itself has then done so (DDP's last such step is 10)."""

_log = logging.getLogger(__name__)


class ForwardBackward:
    """`loss = forward_backward(images, labels)` leaves gradients in the parameters.

    They are scaled so that DDP's mean over ranks, of the sum over a rank's micro-batches, is the mean over the
    global batch. The loss (a scalar on the device) is the micro-batch's own, and good until the next call.

    Args:
        model: the unwrapped model; with several workers its gradients are averaged over them.
        criterion: from logits and labels to the mean loss.
        micro_batches: of all ranks in a global batch.
        compiled: by torch.compile; None as False. What cannot be compiled runs as before, which the log says.
        graph: capture what the device does as a CUDA graph at call WARM_UP_STEPS, and replay it from then on. For steps
            of one micro-batch, shapes that never change, and a stream that is not the default one. A model that
            cannot be captured runs as before, which the log says.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        worker: Worker,
        precision: Precision,
        *,
        micro_batches: int,
        compiled: bool | None = False,
        graph: bool = False,
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parallel = worker.parallel(model)
        forward = self._parallel or model
        if compiled:  # its import takes seconds, whether it is used or not
            import torch._dynamo.config

            torch._dynamo.config.suppress_errors = True
        self._forward = torch.compile(forward, dynamic=False) if compiled else forward
        self._criterion, self._precision = criterion, precision
        self._share = worker.world_size / micro_batches
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls_to_capture = WARM_UP_STEPS if graph else -1

    def __call__(self, images: torch.Tensor, labels: torch.Tensor, *, last: bool = True) -> torch.Tensor:
        """The loss of a micro-batch; only behind the last one of a step do ranks exchange gradients."""
        if self._calls_to_capture == 0:
            self._capture(images, labels)
        self._calls_to_capture -= 1
        if self._graph is None:
            if last or self._parallel is None:
                return self._run(images, labels)
            with self._parallel.no_sync():
                return self._run(images, labels)
        self._images.copy_(images)
        self._labels.copy_(labels)
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._graph.replay()
        return self._loss

    def _run(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with self._precision.autocast():
            loss = self._criterion(self._forward(images), labels)
        self._precision.scaler.scale(loss * self._share).backward()
        return loss.detach()

    def _capture(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._images, self._labels = images.clone(), labels.clone()
        for parameter in self._parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use CUDA meanwhile: NCCL's watchdog does.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._loss = self._run(self._images, self._labels)
        except RuntimeError as error:
            _log.warning("the model cannot be captured as a CUDA graph, its kernels are launched one by one: %s", error)
            for parameter in self._parameters:
                parameter.grad = None
            return
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._graph = graph
