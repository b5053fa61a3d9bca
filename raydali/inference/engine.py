"""Computes the outputs of a model for some parts of a source, in one process."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raydali.data.loading.loader import Loader
from raydali.data.loading.quarantine import Quarantine
from raydali.data.sources.source import Source
from raydali.data.tasks.pipeline import Pipeline
from raydali.host.hardware import PrecisionName, has_bf16
from raydali.inference.kinds.kind import Arrays, Kind
from raydali.inference.parts import Part, PartByPart
from raydali.train.precision import Precision


@dataclass(frozen=True)
class PartResult:
    """The outputs for a part.

    Attributes:
        part: the part.
        arrays: of all samples that could be read, see `Kind.outputs`; and "ids", int64 (n,). Empty if there are none.
        broken: path and reason of the other samples, by id.
        seconds: since this worker began.
    """

    part: Part
    arrays: Arrays
    broken: dict[int, tuple[str, str]] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Inference:
    """A model with its samples, on its way to a worker.

    Attributes:
        kind: what the model predicts.
        network: the model, on the CPU; it takes 8-bit samples.
        pipeline, source: of the samples.
        batch_size: samples of a batch.
        precision: of the forward pass.
        loader: makes the loader, see `Kind.loader`.
    """

    kind: Kind
    network: nn.Module
    pipeline: Pipeline[Any]
    source: Source
    batch_size: int
    precision: PrecisionName | None
    loader: Callable[..., Loader]

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
        order = PartByPart(samples=len(self.source), batch_size=self.batch_size, parts=in_order)
        quarantine = Quarantine(order.samples)
        precision = Precision(self._precision(device), device)
        network = self.network.to(device).eval()
        collected: list[tuple[NDArray[np.int64], dict[str, torch.Tensor]]] = []
        place = 0

        def result() -> PartResult:
            part, broken = in_order[place], quarantine.known
            told = {id: (broken[id].path, broken[id].reason) for id in part.ids if id in broken}
            return PartResult(part, _joined(collected), told, time.perf_counter() - began)

        options: dict[str, Any] = {"device": device, "threads": cpus, "quarantine": lambda _: quarantine}
        with self.loader(self.source, self.pipeline, order, **options) as loader:
            for batch in loader:
                with torch.inference_mode(), precision.autocast():
                    outputs = self.kind.outputs(network, batch)
                while batch.micro_batch.step > place:  # parts may have no sample that can be read
                    yield result()
                    collected.clear()
                    place += 1
                collected.append((batch.ids, outputs))
            while place < len(in_order):
                yield result()
                collected.clear()
                place += 1

    def _precision(self, device: torch.device) -> PrecisionName:
        """The precision of training, if this device is made for it; 16-bit floats without units for them are slow."""
        if device.type == "cpu" and (self.precision != "bf16" or not has_bf16(device)):
            return "fp32"
        return self.precision or "fp32"


def _joined(collected: Sequence[tuple[NDArray[np.int64], dict[str, torch.Tensor]]]) -> Arrays:
    """Join the outputs of batches, which may still be computed on a GPU."""
    if not collected:
        return {}
    names = collected[0][1].keys()
    joined: Arrays = {name: torch.cat([each[name] for _, each in collected]).cpu().numpy() for name in names}
    return joined | {"ids": np.concatenate([ids for ids, _ in collected])}
