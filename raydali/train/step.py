"""The forward and backward pass of a micro-batch; on a GPU one CUDA graph, so that no kernel waits for the host."""

import logging
from collections.abc import Callable

import torch
from torch import nn

from raydali.host.hardware import OVERLAP_PAYS
from raydali.measure.allreduce_wait import AllReduceTimer
from raydali.measure.flops import flops_per_image
from raydali.train.compilation import compile_function
from raydali.train.gradients import GradientSums, ddp_is_slower
from raydali.train.precision import Precision
from raydali.train.worker import Worker

WARM_UP_STEPS, WARM_UP_STEPS_OF_DDP = 3, 11
"""Number of eager steps before the capture of a CUDA graph: compilation, autotuning and DDP's own profiling (until step
10) must be complete. Steps in fp16 are as many as with DDP: the first updates are left out if gradients overflow."""

_log = logging.getLogger(__name__)


class ForwardBackward:
    """A function that computes the loss of a micro-batch and adds its gradients to those of the model.

    It is called as `loss = forward_backward(images, labels)`. Gradients are scaled: each rank sums over its
    micro-batches, the all-reduce sums over ranks, and the result is the mean over the global batch. The loss is the
    micro-batch's own, a scalar on the device, and valid until the next call.

    Args:
        model: the module with all parameters that the loss depends on; their gradients are averaged over workers.
        loss: computes the mean loss of a micro-batch by calling the model.
        micro_batches: number of micro-batches of all ranks in a global batch.
        compiled: whether torch.compile compiles the loss, including the model; None means False. What cannot be
            compiled runs eagerly, which is logged.
        fused: whether a compiled model gets fused BatchNorm, see fused/graph.py; None means False.
        graph: whether to capture a CUDA graph after `warm_up_steps` calls, which later calls replay. This needs steps
            of one micro-batch, tensors of constant shapes until `expect_other_shapes`, and a stream other than the
            default one. A loss that cannot be captured runs without a graph, which is logged.
        overlap: whether DDP sums the gradients during the backward pass; otherwise one all-reduce follows the pass, see
            gradients.py. None: what is faster on this device.

    Attributes:
        loss: see the argument.
        warm_up_steps: number of eager steps before the capture.
        allreduce: the timer of the all-reduce; None for one rank.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., torch.Tensor],
        worker: Worker,
        precision: Precision,
        *,
        micro_batches: int,
        compiled: bool | None = False,
        fused: bool | None = False,
        graph: bool = False,
        overlap: bool | None = None,
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if worker.world_size > 1 and overlap is None:
            overlap = worker.device.type in OVERLAP_PAYS and not (graph and ddp_is_slower(self._parameters, worker))
        follows = worker.world_size > 1 and not overlap
        self._sums = GradientSums(model, worker) if follows else None
        self._parallel = None if follows else worker.parallel(_Loss(model, loss))
        is_short = self._parallel is None and not precision.scaler.is_enabled()
        self.warm_up_steps = WARM_UP_STEPS if is_short else WARM_UP_STEPS_OF_DDP
        self.allreduce = AllReduceTimer(self._parameters, in_pass=not follows) if worker.world_size > 1 else None
        self.loss, forward = loss, self._parallel or loss
        self._forward = compile_function(forward, fused=fused) if compiled else forward
        self._precision = precision
        self._share = (1 if follows else worker.world_size) / micro_batches  # DDP averages over ranks
        self._captures = graph
        self.expect_other_shapes()

    def expect_other_shapes(self) -> None:
        """Free the CUDA graph, if any: the next calls have inputs of other shapes, and are captured anew."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor | None] = []
        self._calls_to_capture = self.warm_up_steps if self._captures else -1

    def __call__(self, *inputs: torch.Tensor, last: bool = True) -> torch.Tensor:
        """Return the loss of a micro-batch. Ranks all-reduce gradients only after the `last` one of a step."""
        if self._calls_to_capture == 0:
            self._capture(*inputs)
        self._calls_to_capture -= 1
        if self._graph is None:
            if last or self._parallel is None:
                return self._run(*inputs, last=last)
            with self._parallel.no_sync():
                return self._run(*inputs, last=False)
        for captured, given in zip(self._inputs, inputs, strict=True):
            captured.copy_(given)
        self._graph.replay()  # first, because the GPU may wait for it
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def flops_per_image(self, *inputs: torch.Tensor) -> float | None:
        """Count the floating-point operations that an image of these inputs needs; see `measure.flops`."""
        with self._precision.autocast():
            return flops_per_image(self.loss, self._parameters, inputs)

    def _run(self, *inputs: torch.Tensor, last: bool = True) -> torch.Tensor:
        with self._precision.autocast():
            loss: torch.Tensor = self._forward(*inputs)
        self._precision.scaler.scale(loss * self._share).backward()
        if last and self._sums is not None and self.allreduce is not None:
            self._sums.all_reduce()
            self.allreduce.end()
        return loss.detach()

    def _capture(self, *inputs: torch.Tensor) -> None:
        self._inputs = [each.clone() for each in inputs]
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may use CUDA meanwhile, for example NCCL's watchdog.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._loss = self._run(*self._inputs)
        except RuntimeError as error:
            _log.warning(
                "the model cannot be captured as a CUDA graph, so its kernels are launched one by one: %s", error
            )
        else:
            self._gradients = [parameter.grad for parameter in self._parameters]
            self._graph = graph
        finally:
            for parameter, gradient in zip(self._parameters, before, strict=True):
                parameter.grad = gradient


class _Loss(nn.Module):
    """The loss as a module with the model's parameters, which DistributedDataParallel can wrap."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of these inputs."""
        return self._loss(*inputs)
