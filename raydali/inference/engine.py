"""Computes the outputs of a network for some parts of a source, in one process, and joins the outputs of all parts."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib import import_module
from itertools import groupby
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raydali.data.broken.quarantine import Quarantine, none_read
from raydali.data.load.loader import Batch, Loader
from raydali.extras import default_loader
from raydali.host.cpu_times import usable_cores
from raydali.host.hardware import PrecisionName, has_bf16
from raydali.inference.check import Checked, check_run
from raydali.inference.parts import Calls, Part, PartByPart, PartWorker, cut
from raydali.inference.task_results.task_results import Arrays, TaskResults
from raydali.inference.trained_run import TrainedRun
from raydali.options.inference import InferenceOptions
from raydali.training.evaluation.validation import ValidationPass
from raydali.training.forward_backward import Precision

Collected = list[tuple[NDArray[np.int64], dict[str, Any]]]
"""Ids and outputs of each batch."""


@dataclass(frozen=True)
class PartResult:
    """The outputs for a part.

    Attributes:
        part: the part.
        arrays: of all samples that could be read, see `TaskResults.outputs`; and "ids", int64 (n,). Empty if there are
            none.
        broken: path and reason of the other samples, by id.
        seconds: since this worker began, whose start counts too.
        calls: what the job's evaluation has summed and gathered, see `PartWorker`; None if no sample could be read.
        precision: of the forward pass.
    """

    part: Part
    arrays: Arrays
    broken: dict[int, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 0.0
    calls: Calls | None = None
    precision: str = ""


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A network with its samples, on its way to a worker.

    Attributes:
        task_results: what is made of its outputs; has the samples and their pipeline.
        network: on the CPU; it takes what the loader delivers.
        evaluate: the job's evaluation, which takes network and ValidationPass; None: only outputs are computed.
        batch_size: samples of a batch.
        precision: of the forward pass.
        loader: makes the loader; it takes the arguments of `Loader`.
    """

    task_results: TaskResults
    network: nn.Module
    evaluate: Callable[..., Mapping[str, Any]] | None
    batch_size: int
    precision: PrecisionName | None
    loader: Callable[..., Loader]

    @cached_property
    def parts(self) -> list[Part]:
        """All parts of the source."""
        return cut(len(self.task_results.source), self.batch_size, self.task_results.edges())

    def results(self, parts: Sequence[Part], device: torch.device, cpus: int) -> Iterator[PartResult]:
        """Yield the results of some parts; samples that cannot be read are left out, and told.

        Args:
            parts: those to do, in any order.
            device: where the model runs.
            cpus: number of threads that read and decode.
        """
        began = time.perf_counter()
        # The first batch must be the largest: DALI's pipelines are built for it.
        in_order = sorted(parts, key=lambda part: -min(len(part.ids), self.batch_size))
        source = self.task_results.source
        order = PartByPart(samples=len(source), batch_size=self.batch_size, parts=in_order)
        quarantine = Quarantine(order.samples)
        name = self._precision(device)
        precision = Precision(name, device)
        network = self.network.to(device).eval()
        options: dict[str, Any] = {"device": device, "threads": cpus, "quarantine": lambda _: quarantine}
        with self.loader(source, self.task_results.pipeline, order, **options) as loader:
            groups = groupby(loader, lambda batch: batch.micro_batch.step)
            step, batches = next(groups, (None, iter(())))
            for place, part in enumerate(in_order):
                collected, calls = Collected(), None
                if step == place:  # otherwise it has no sample that can be read
                    calls = self._compute(network, batches, device, precision, collected)
                    step, batches = next(groups, (None, iter(())))
                broken = quarantine.known
                unread = {id: (broken[id].path, broken[id].reason) for id in part.ids if id in broken}
                yield PartResult(part, _of_batches(collected), unread, time.perf_counter() - began, calls, name)

    def _compute(
        self,
        network: nn.Module,
        batches: Iterable[Batch],
        device: torch.device,
        precision: Precision,
        collected: Collected,
    ) -> Calls:
        """Collect the outputs for batches; return the calls of the job's evaluation, if there is one."""
        worker, newest = PartWorker(device), list[Any]()

        def with_outputs() -> Iterator[Batch]:
            for batch in batches:
                newest.clear()
                if self.evaluate is not None:
                    yield batch
                with torch.inference_mode():
                    if not newest:
                        with precision.autocast():
                            network(batch[self.task_results.pipeline.outputs[0]])
                    collected.append((batch.ids, self.task_results.outputs(newest[-1], batch)))

        with network.register_forward_hook(lambda _, __, outputs: newest.append(outputs)):
            if self.evaluate is None:
                for _ in with_outputs():
                    pass
            else:
                self.evaluate(network, ValidationPass(with_outputs(), self.task_results.source, worker, precision))
        return worker.calls

    def _precision(self, device: torch.device) -> PrecisionName:
        """The precision of training, if this device is made for it; 16-bit floats without units for them are slow."""
        if device.type == "cpu" and (self.precision != "bf16" or not has_bf16(device)):
            return "fp32"
        return self.precision or "fp32"

    def metrics(self, results: Iterable[PartResult]) -> dict[str, Any]:
        """Return the figures of the job's evaluation over all parts."""
        assert self.evaluate is not None, "evaluation"
        ordered = sorted(results, key=lambda result: result.part.number)
        worker = PartWorker(torch.device("cpu"), [result.calls for result in ordered if result.calls is not None])
        nothing = ValidationPass((), self.task_results.source, worker, Precision("fp32", worker.device))
        figures = self.evaluate(self.network, nothing)
        return {name: value for name, value in figures.items() if name != "seconds"}


def joined(results: Iterable[PartResult]) -> PartResult:
    """Return the results of all parts as one, whose arrays are in the order of ids.

    Raises:
        DataError: no sample could be read.
    """
    ordered = sorted(results, key=lambda result: result.part.number)
    read = [result.arrays for result in ordered if result.arrays]
    broken = {id: why for result in ordered for id, why in result.broken.items()}
    if not read:
        raise none_read(f"{path}: {reason}" for path, reason in broken.values())
    arrays = {name: np.concatenate([part[name] for part in read]) for name in read[0]}
    whole = Part(0, range(ordered[-1].part.ids[-1] + 1))
    seconds = max(result.seconds for result in ordered)
    return PartResult(whole, arrays, broken, seconds, precision=ordered[0].precision)


def _of_batches(collected: Collected) -> Arrays:
    """Join the outputs of batches, which may still be computed on a GPU."""
    if not collected:
        return {}
    joined: Arrays = {"ids": np.concatenate([ids for ids, _ in collected])}
    for name, first in collected[0][1].items():
        values = [outputs[name] for _, outputs in collected]
        is_tensor = isinstance(first, torch.Tensor)
        joined[name] = torch.cat(values).cpu().numpy() if is_tensor else [row for rows in values for row in rows]
    return joined


def _import_torchvision() -> None:
    """Import torchvision without PyTorch's compiler, whose import takes a quarter of a command's CPU time.

    Only RoI alignment needs a function of it, which then imports it.
    """
    name = "torch._dynamo.utils"
    if name in sys.modules:
        return
    placeholder = ModuleType(name)
    vars(placeholder)["is_compile_supported"] = lambda device: import_module(name).is_compile_supported(device)
    sys.modules[name] = placeholder
    with suppress(ImportError):  # a version that needs more of it is imported as usual later
        import torchvision  # noqa: F401
    del sys.modules[name]


def checked_inference(
    run: TrainedRun,
    task_results: TaskResults,
    options: InferenceOptions,
    *,
    evaluates: bool = False,
    own_data: bool = False,
) -> tuple[Inference, Checked]:
    """Build the network of a run for some samples, and check that it computes what the run computed.

    Args:
        run: the trained run.
        task_results: what is made of the outputs for the samples.
        options: how the model runs.
        evaluates: whether the job's evaluation is computed.
        own_data: whether the samples must be those that the run validated.

    Raises:
        UsageError: the weights do not fit the model.
        CommandError: the network computes something else, or the samples are others.
    """
    _import_torchvision()
    # In a container, PyTorch would start a thread for each core of the machine.
    torch.set_num_threads(min(torch.get_num_threads(), options.cpus_per_worker or usable_cores()))
    inference = Inference(
        task_results=task_results,
        network=run.network(len(task_results.classes)),
        evaluate=partial(run.job.evaluate, run.config) if evaluates else None,
        batch_size=task_results.batch_size or options.batch_size or run.config.batch_size,
        precision=options.precision or run.config.precision,
        loader=partial(run.make_loader, options.loader or default_loader()),
    )
    return inference, check_run(run, inference.network, own_data=own_data, unchecked=options.unchecked)
