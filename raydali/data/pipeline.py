"""What a task adds to the loader: which numbers go into a DALI graph for a sample, and the graph itself.

A task is one `Pipeline`; the loaders (loader.py) know nothing else about it. See classification.py for one.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Device = Literal["cpu", "gpu"]
Source = TypeVar("Source", contravariant=True)


class Pipeline(Protocol[Source]):
    """From ids of a source to tensors, the same on every rank: randomness is keyed on (seed, epoch, id) alone."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs, in order; "images" and "labels" for classification."""
        ...

    def inputs(
        self, source: Source, ids: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Sequence[NDArray[Any]] | NDArray[Any], ...]:
        """What goes into the graph for these samples, each a batch: a list of arrays, or an array's rows. Host work
        on the hot path: vectorised, no reading of files."""
        ...

    def graph(self, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """The DALI graph (fn calls on DataNodes) from the inputs to the outputs; images leave as HWC, normalised."""
        ...

    def sample(self, source: Source, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        """One sample by Pillow and torchvision instead of DALI, on the CPU: the baseline that `--loader torch` runs.
        The same outputs as the graph's, images as normalised float32 CHW."""
        ...
