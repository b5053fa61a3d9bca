"""A pass over validation samples, and its forward pass: compiled and captured, for batches of one size."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from raydali.data.broken.quarantine import none_read
from raydali.data.load.loader import Batch, Loader
from raydali.training.cuda_graphs import capture
from raydali.training.forward_backward import Precision, compile_function
from raydali.training.worker import Worker

WARM_UP_CALLS = 3
"""Number of calls before the capture of a CUDA graph: compilation and autotuning must be complete."""


@dataclass(frozen=True)
class ValidationPass:
    """A pass of one rank over its share of the validation samples, each of which comes once, on one rank.

    Attributes:
        batches: this rank's batches. Ranks may have different numbers of them, or none, so that an evaluation
            communicates only after the last one, by `worker`.
        source: all validation samples, which the ids of a batch refer to.
        worker: this rank.
        precision: of the forward pass; `precision.autocast()` applies it.
    """

    batches: Iterable[Batch]
    source: Any
    worker: Worker
    precision: Precision


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside this context, and restore the mode of each module afterwards.

    A frozen BatchNorm was in evaluation mode before, and remains in it.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])
        for module, training in before:
            module.training = training


def require_read(samples: float, batches: Iterable[Batch]) -> None:
    """Check that some rank could read samples of these batches.

    Raises:
        DataError: none could; the message names one that this rank found to be broken.
    """
    if not samples:
        raise none_read(batches.quarantine.known.values() if isinstance(batches, Loader) else ())


def gather_arrays(worker: Worker, arrays: Mapping[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
    """Return the arrays of all ranks, ordered by rank, on rank 0; others get an empty list. All ranks must call it."""
    content = BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]  # numpy takes them for its option allow_pickle
    return [dict(np.load(BytesIO(saved), allow_pickle=False)) for saved in worker.gather_bytes(content.getvalue())]


class ValidationForward(nn.Module):
    """A model that computes its outputs faster in evaluation mode, without gradients.

    `warm_up` prepares the model for full batches. Later a smaller batch is padded to a full one, so that nothing is
    compiled or tuned during a validation. The weights are read in place. In training mode, before `warm_up`, and for
    samples of another shape, the model runs as it is.

    Args:
        model: in evaluation mode it maps samples (N, ...) to a tensor (N, ...), each sample independently of others.
        precision: precision of the forward pass.
    """

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.model, self._precision = model, precision
        self._run: Callable[[torch.Tensor], torch.Tensor] = lambda samples: model(samples)
        self._full: torch.Tensor | None = None
        self._outputs: torch.Tensor
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def warm_up(self, samples: torch.Tensor, *, compiled: bool, graph: bool) -> None:
        """Compile, tune and capture the model for batches of this size and memory format.

        Args:
            samples: a full batch, (N, ...).
            compiled: whether torch.compile compiles the model. What cannot be compiled runs eagerly.
            graph: whether to capture a CUDA graph. It needs a stream other than the default one. A model that cannot be
                captured runs without a graph, which is logged.
        """
        full = self._full = samples.clone()
        if compiled:
            self._run = compile_function(self._run)

        def outputs() -> torch.Tensor:
            with evaluating(self), self._precision.autocast():
                return self._run(full)

        for _ in range(WARM_UP_CALLS):
            outputs()
        captured = capture(outputs, "the validation") if graph else None
        if captured is not None:
            self._graph, self._outputs = captured

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        """Return the model's outputs for samples (N, ...), (N, ...)."""
        full, count = self._full, len(samples)
        fits = full is not None and full[0].shape == samples.shape[1:] and full.dtype == samples.dtype
        if self.training or full is None or not fits or count > len(full):
            outputs: torch.Tensor = self.model(samples)
            return outputs
        with torch.inference_mode(), self._precision.autocast():
            full[:count].copy_(samples)
            if self._graph is None:
                return self._run(full)[:count]
            self._graph.replay()
            return self._outputs[:count].clone()
