"""The forward pass of a validation: compiled, and on a GPU one CUDA graph, for batches of one size."""

from collections.abc import Callable

import torch
from torch import nn

from raydali.train.evaluation.validation_pass import evaluating
from raydali.train.step import Precision, capture, compile_function

WARM_UP_CALLS = 3
"""Number of calls before the capture of a CUDA graph: compilation and autotuning must be complete."""


class ValidationForward(nn.Module):
    """A model that computes its outputs faster in evaluation mode, without gradients.

    `warm_up` compiles and captures the model for full batches. Later a smaller batch is padded to a full one, so that
    nothing is compiled or tuned during a validation. The weights are read in place. In training mode, before `warm_up`,
    and for samples of another shape, the model runs as it is.

    Args:
        model: in evaluation mode it maps samples (N, ...) to a tensor (N, ...), each sample independently of others.
        precision: precision of the forward pass.
        compiled: whether torch.compile compiles the model; None means False. What cannot be compiled runs eagerly.
        graph: whether to capture a CUDA graph. It needs a stream other than the default one. A model that cannot be
            captured runs without a graph, which is logged.
    """

    def __init__(self, model: nn.Module, precision: Precision, *, compiled: bool | None, graph: bool) -> None:
        super().__init__()
        self.model, self._precision, self._captures = model, precision, graph
        self.is_faster = bool(compiled or graph)
        self._run: Callable[[torch.Tensor], torch.Tensor] = lambda samples: model(samples)
        if compiled:
            self._run = compile_function(self._run)
        self._full: torch.Tensor | None = None
        self._outputs: torch.Tensor
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def warm_up(self, samples: torch.Tensor) -> None:
        """Compile and capture the model for batches of this size and memory format."""
        full = self._full = samples.clone()

        def outputs() -> torch.Tensor:
            with evaluating(self), self._precision.autocast():
                return self._run(full)

        for _ in range(WARM_UP_CALLS):
            outputs()
        captured = capture(outputs, "the validation") if self._captures else None
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
