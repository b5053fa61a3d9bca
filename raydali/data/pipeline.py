"""What a task adds to the loader: which numbers go into a DALI graph for a sample, and the graph itself.

A task is one `Pipeline` over its kind of `Source`; the loaders (loader.py) know nothing else about it. See
classification.py for one. The driver makes pipelines too, to check their settings: torch and DALI are imported inside
`graph` and `sample` alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Device = Literal["cpu", "gpu"]
AnySource = TypeVar("AnySource", bound="Source", contravariant=True)


class Source(Protocol):
    """N samples by id 0..N-1, whatever they are: what loaders and jobs need of each kind."""

    def __len__(self) -> int:
        """N."""
        ...

    def path(self, id: int) -> str:
        """Where a sample comes from, for messages."""
        ...

    @property
    def fingerprint(self) -> str:
        """Another one for other samples: a run is resumed on its own data only."""
        ...


class Pipeline(Protocol[AnySource]):
    """From ids of a source to tensors, the same on every rank: randomness is keyed on (seed, epoch, id) alone."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs, in order; "images" and "labels" for classification."""
        ...

    def inputs(
        self, source: AnySource, ids: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Sequence[NDArray[Any]] | NDArray[Any], ...]:
        """What goes into the graph for these samples, each a batch: a list of arrays, or an array's rows.

        Called ahead of time, on several threads at once. Paths go in where DALI can read the files, so that no bytes
        of theirs pass through Python; contents where it cannot.
        """
        ...

    def graph(self, source: AnySource, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """The DALI graph (fn calls on DataNodes) from the inputs to the outputs; images leave as HWC, normalised.

        The source says what kind of files the inputs are: paths or contents.
        """
        ...

    def sample(self, source: AnySource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """One sample by Pillow and torchvision instead of DALI, on the CPU: the baseline that `--loader torch` runs.
        The same outputs as the graph's, images as normalised float32 CHW."""
        ...
