"""The interface of a task: the inputs of a DALI graph for a sample, and the graph itself.

A task is one `Pipeline` over its kind of `Source`; the loaders (data/loading/loader.py) know nothing else about it:

    ids --> inputs --> [ read, peek at shapes --> compute_crops ] --> graph --> tensors
            threads      where `image_files` > 0

The position of a crop depends on the shape of the image, which only the file has. A task may therefore have its image
files read first, and compute the crops of a whole batch at once with numpy, several times faster than in a DALI graph.

See classification.py for a task. The driver makes pipelines too, to check their settings: torch and DALI are imported
inside `graph` and `sample` alone.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.read_timing import Cause
from raydali.data.sources.source import Source

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode

Device = Literal["cpu", "gpu"]
Inputs = tuple[Sequence[Any] | NDArray[Any], ...]
"""One or more batches: lists of arrays or tensors, or arrays of which each row belongs to a sample."""
AnySource = TypeVar("AnySource", bound=Source, contravariant=True)


class Pipeline(Protocol[AnySource]):
    """Makes tensors of a source's ids, the same on every rank: random numbers depend on (seed, epoch, id) alone.

    To be subclassed.
    """

    image_files: ClassVar[int] = 0
    """Number of the inputs, from the first on, that are image files for the loader to read; 0: the graph reads."""
    gpu_inputs: ClassVar[int] = 0
    """Number of the inputs, from the first on, that are torch tensors on the GPU already."""
    conditionals: ClassVar[bool] = False
    """Whether the graph has `if`s on data, as `nvidia.dali.auto_aug` does. DALI then rewrites the source of `graph` and
    of all that it calls, inner functions too: define one for `fn.python_function` outside, or it is slow."""
    inputs_are: ClassVar[Cause] = "python"
    """Cause, in the verdict, of the time of `inputs` without reading files: "cpu decode" if it decodes."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the graph's outputs, in order; "images" and "labels" for classification."""
        ...

    def inputs(self, source: AnySource, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Inputs:
        """Return the inputs of the graph for these samples.

        Called ahead of time, on several threads at once. Files are passed as paths if DALI reads them
        (`dali_reads`), so that their bytes do not pass through Python; else as contents.
        """
        ...

    def unfit(self, shapes: Sequence[NDArray[np.int64]], inputs: Inputs) -> NDArray[np.bool_]:
        """Return which samples (N,) `sample` refuses though their images can be decoded; see `compute_crops`."""
        return np.zeros(len(shapes[0]), np.bool_)

    def compute_crops(self, shapes: Sequence[NDArray[np.int64]], inputs: Inputs, device: Device) -> Inputs:
        """Return the inputs of the graph besides the files, once the shapes of the images are known.

        Args:
            shapes: for each of the `image_files`, height and width (N, 2), as EXIF orientation has them.
            inputs: those that follow the image files.
            device: where the graph will run.
        """
        return inputs

    def graph(self, source: AnySource, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """The DALI graph (fn calls on DataNodes) to the outputs; images leave as HWC in 8 bits.

        Args:
            source: the samples.
            inputs: as `inputs` made them; with `image_files`, contents of these and what `compute_crops` returned.
            device: where the graph runs.
        """
        ...

    def sample(self, source: AnySource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Make one sample by Pillow and torchvision on the CPU, for the baseline `--loader torch` and for checks.

        The outputs are those of the graph, images as CHW.
        """
        ...
