"""The arithmetic of a step: precision, and forward and backward pass of a micro-batch.

On a GPU forward and backward are one CUDA graph, so that no kernel waits for the host. If a step has several
micro-batches, each replays the graph, which adds to the gradients. With sharded weights, the first one's graph gathers
them, the last one's sums gradients over ranks, and those between have a graph without communication.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import nn

from raydali.errors import UsageError
from raydali.host.hardware import OVERLAP_PAYS, PrecisionName, fastest_precision, has_bf16
from raydali.measure.allreduce_wait import AllReduceTimer, GatherTimer
from raydali.measure.flops import flops_per_image
from raydali.measure.memory import largest_batch, memory_of
from raydali.training.blocks import OtherForwards, kept_activations
from raydali.training.cuda_graphs import WARM_UP_STEPS, GraphedParts, capture
from raydali.training.gradients import GradientSums, ddp_is_slower
from raydali.training.worker import Worker

if TYPE_CHECKING:
    from raydali.training.sharding import Sharding

Result = TypeVar("Result")

MAX_SHAPES = 64
"""Number of shapes of inputs for which torch.compile compiles a model; beyond it, the model would run eagerly."""
WARM_UP_STEPS_OF_DDP = 11
"""As `WARM_UP_STEPS`, with DDP's own profiling, which lasts until step 10. Steps in fp16 are as many: the first updates
are left out if gradients overflow."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

_log = logging.getLogger(__name__)


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


def compile_function(function: Callable[..., Result], *, fused: bool | None = False) -> Callable[..., Result]:
    """Return the function compiled for each shape of its inputs. What cannot be compiled runs eagerly, and is logged.

    Args:
        function: a function or a module.
        fused: whether models in it get fused BatchNorm in training, see fused/passes.py; None means False.
    """
    import torch._dynamo.config  # it takes seconds

    torch._dynamo.config.suppress_errors = True
    torch._dynamo.config.recompile_limit = MAX_SHAPES
    options: dict[str, str | int | bool | Callable[..., object]] | None = None
    if fused:
        from raydali.training.fused.passes import inductor_options

        options = inductor_options()
    return torch.compile(function, dynamic=False, options=options)


class ForwardBackward:
    """A function that computes the loss of a micro-batch and adds its gradients to the gradients of the model.

    It is called as `loss = forward_backward(images, labels)`. Gradients are scaled: each rank sums over its
    micro-batches, the all-reduce sums over ranks, and the result is the mean over the global batch. The loss is the
    micro-batch's own, a scalar on the device, and valid until the next call.

    Args:
        model: the module with all parameters that the loss depends on; their gradients are averaged over workers.
        loss: computes the mean loss of a micro-batch by calling the model.
        micro_batches: number of micro-batches of all ranks in a global batch.
        compiled: whether torch.compile compiles the loss, including the model; None means False. What cannot be
            compiled runs eagerly, which is logged.
        fused: whether a compiled model gets fused BatchNorm, see fused/passes.py; None means False.
        graph: whether to capture a CUDA graph after `warm_up_steps` calls, which later calls replay. This needs tensors
            of constant shapes until `expect_other_shapes`, and a stream other than the default one. A loss that cannot
            be captured runs without a graph, which is logged.
        parts: modules of the model whose shapes are constant, for a loss whose shapes are not: `graph` captures these
            one by one instead of the loss, unless it is compiled, see cuda_graphs.py.
        overlap: whether DDP sums the gradients during the backward pass; otherwise one all-reduce follows the pass, see
            gradients.py. None: what is faster on this device. A graph of one of several micro-batches needs False.
        sharding: what has sharded the model, and sums its gradients; its blocks are compiled one by one. Each step of a
            rank has as many micro-batches, and if these are several, they are captured only if no other function has
            this sharding. None: each rank has the whole model.

    Raises:
        UsageError: a sharded loss cannot be captured: the weights that are gathered then are lost.

    Attributes:
        loss: see the argument.
        warm_up_steps: number of eager steps before the capture.
        allreduce: the timer of the all-reduce, or of a sharded model's communication; None for one rank.
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
        parts: Sequence[nn.Module] = (),
        overlap: bool | None = None,
        sharding: "Sharding | None" = None,
    ) -> None:
        self._parts: OtherForwards = GraphedParts(parts if graph and not (compiled or sharding) else ())
        graph = graph and not parts
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        several = micro_batches > worker.world_size
        sums = worker.world_size > 1 and sharding is None
        if sums and overlap is None:
            pays = worker.device.type in OVERLAP_PAYS
            overlap = pays and not (graph and (several or ddp_is_slower(self._parameters, worker)))
        follows, adds = sums and not overlap, graph and several and not (overlap or sharding)
        self._sums = GradientSums(model, worker) if follows or adds else None
        self._added = self._sums if adds else None
        self._parallel = worker.parallel(_Loss(model, loss)) if sums and not follows else None
        is_short = self._parallel is None and not precision.scaler.is_enabled()
        self.warm_up_steps = WARM_UP_STEPS if is_short else WARM_UP_STEPS_OF_DDP
        self.allreduce: AllReduceTimer | GatherTimer | None = None
        if sums:
            self.allreduce = AllReduceTimer(self._parameters, in_pass=not follows)
        if sharding is not None:
            sharding.functions += 1
            self.allreduce = GatherTimer(sharding.units(model))
        self.loss, forward = loss, self._parallel or loss
        self._model, self._sharding, self._several = model, sharding, several
        self._forward = compile_function(forward, fused=fused) if compiled and sharding is None else forward
        if compiled and sharding is not None:
            root, *blocks = sharding.units(model)
            units = blocks or [root]  # the gathering stays outside of what is compiled
            self._parts = OtherForwards({unit: compile_function(unit.forward, fused=fused) for unit in units})
        self._precision = precision
        self._share = (1 if follows else worker.world_size) / micro_batches  # DDP averages over ranks
        self._captures = graph and (adds or not several or sharding is not None)
        self.expect_other_shapes()

    @property
    def is_captured(self) -> bool:
        """Return whether calls replay a CUDA graph."""
        return bool(self._graphs)

    def largest_that_fits(self, *inputs: torch.Tensor) -> int | None:
        """Return how many of these samples fit, after not all of them did; None if not even one does.

        It computes loss and gradients of fewer samples, and communicates with no other rank: of a sharded model it does
        not know.
        """
        if self._sharding is not None:
            return None

        def memory(size: int) -> dict[str, int]:  # whose tensors are free again when it ends
            with self._precision.autocast():
                loss = self.loss(*(tensor[:size] for tensor in inputs))
            torch.autograd.grad(loss, self._parameters, allow_unused=True)
            return memory_of(inputs[0].device)

        size = len(inputs[0])
        while size > 1:
            size //= 2
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            with suppress(torch.OutOfMemoryError):
                return largest_batch(memory(size), size)
        return None

    def expect_other_shapes(self) -> None:
        """Free CUDA graphs, if any: the next step has inputs of other shapes, and is captured anew."""
        self._graphs: dict[tuple[bool, bool], _Captured] = {}
        self._calls_to_capture = self.warm_up_steps if self._captures else math.inf
        self._is_first = True
        if isinstance(self.allreduce, GatherTimer):
            self.allreduce.forget()

    def __call__(self, *inputs: torch.Tensor, last: bool = True) -> torch.Tensor:
        """Return the loss of a micro-batch. Ranks all-reduce gradients only after the `last` one of a step."""
        # FSDP2's state passes from one capture to the next: all of a step's are made in one step.
        kind = (self._is_first, last) if self._sharding is not None else (True, True)
        begins = kind[0] and self._calls_to_capture <= 0 and not self._shares_steps()
        if kind not in self._graphs and (self._graphs or begins):
            self._capture(kind, *inputs)
        self._calls_to_capture -= 1
        self._is_first = last
        if kind in self._graphs:
            loss = self._replay(self._graphs[kind], *inputs)
        elif last or self._parallel is None:
            loss = self._run(*inputs, last=last)
        else:
            with self._parallel.no_sync():
                loss = self._run(*inputs)
        if last and (not self._graphs or self._added is not None):
            self._all_reduce()
        return loss

    def _shares_steps(self) -> bool:
        """Return whether another function may get micro-batches between these, whose weights no graph has gathered."""
        return self._several and self._sharding is not None and self._sharding.functions > 1

    def _replay(self, captured: "_Captured", *inputs: torch.Tensor) -> torch.Tensor:
        for copy, tensor in zip(captured.inputs, inputs, strict=True):
            copy.copy_(tensor)
        if self._added is not None:
            self._added.collect()
        captured.graph.replay()  # first, because the GPU may wait for it
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = parameter.grad if gradient is None else gradient
        return captured.loss

    def flops_per_image(self, *inputs: torch.Tensor) -> float | None:
        """Count the floating-point operations that an image of these inputs needs; see `measure.flops`."""
        if self._sharding is not None:
            self._sharding.begin(self._model, last=True)
        with self._precision.autocast(), kept_activations():
            return flops_per_image(self.loss, self._parameters, inputs, sharded=self._sharding is not None)

    def _run(self, *inputs: torch.Tensor, last: bool = True) -> torch.Tensor:
        if self._sharding is not None:
            self._sharding.begin(self._model, last=last)
        with self._precision.autocast(), self._parts:
            loss: torch.Tensor = self._forward(*inputs)
        self._precision.scaler.scale(loss * self._share).backward()
        return loss.detach()

    def _all_reduce(self) -> None:
        if self._sums is not None and isinstance(self.allreduce, AllReduceTimer):
            self.allreduce.begin()
            self._sums.all_reduce()
            self.allreduce.end()

    def _run_captured(self, *inputs: torch.Tensor, last: bool) -> torch.Tensor:
        loss = self._run(*inputs, last=last)
        if self._added is None:
            self._all_reduce()
        else:
            self._added.add()
        return loss

    def _capture(self, kind: tuple[bool, bool], *inputs: torch.Tensor) -> None:
        inputs = tuple(tensor.clone() for tensor in inputs)
        first = next((captured.graph for captured in self._graphs.values()), None)
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        captured = capture(lambda: self._run_captured(*inputs, last=kind[1]), "the model", first)
        if captured is not None:
            self._graphs[kind] = _Captured(inputs, *captured, [parameter.grad for parameter in self._parameters])
        elif self._sharding is not None:
            raise UsageError("--shard cannot go on after a failed capture of a CUDA graph: add --no-cuda-graph")
        else:
            self._calls_to_capture = math.inf
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient


class _Captured(NamedTuple):
    """The CUDA graph of a micro-batch, with the tensors that it reads and writes. Gradients may be None."""

    inputs: tuple[torch.Tensor, ...]
    graph: torch.cuda.CUDAGraph
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]


class _Loss(nn.Module):
    """The loss as a module with the model's parameters, which DistributedDataParallel can wrap."""

    def __init__(self, model: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self._loss = model, loss

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss of these inputs."""
        return self._loss(*inputs)
