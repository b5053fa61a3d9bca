"""The interface of a task: the inputs of a DALI graph, and the graph itself.

A task is a `Pipeline` for one kind of `Source`. The loaders (data/load/loader.py) use only this interface:

    ids --> inputs --> [ read, peek at shapes --> compute_crops ] --> graph --> tensors
            threads      if `image_files` > 0

The position of a crop depends on the shape of the image, which is in the file. A task may therefore let the loader read
its image files first, and then compute the crops of a whole batch with numpy. This is several times faster than in a
DALI graph.

classification.py is an example of a task. The driver also makes pipelines, to check their settings. Therefore torch and
DALI are only imported inside `graph` and `sample`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.source import Source
from raydali.data.read.reading import Cause

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode

Device = Literal["cpu", "gpu"]
Interpolation = Literal["bilinear", "bicubic"]
"""The filter that resizes images; it is widened where an image becomes smaller (antialiasing)."""
Inputs = tuple[Sequence[Any] | NDArray[Any], ...]
"""Inputs of a batch: each is a list of arrays or tensors, or an array with one row per sample."""
AnySource = TypeVar("AnySource", bound=Source, contravariant=True)


class Pipeline(Protocol[AnySource]):
    """The base class of tasks, which convert the ids of a source to tensors.

    Random numbers may depend on (seed, epoch, id) only, so that all ranks make the same tensors.
    """

    image_files: ClassVar[int] = 0
    """The number of first inputs that are image files, which the loader reads; 0 if the graph reads files itself."""
    gpu_inputs: ClassVar[int] = 0
    """The number of first inputs that are already torch tensors on the GPU."""
    conditionals: ClassVar[bool] = False
    """True if the graph has `if` statements on data, as `nvidia.dali.auto_aug` has. DALI then rewrites `graph`, its
    inner functions and all functions that it calls. Define the function for `fn.python_function` outside, or it is
    slow."""
    inputs_are: ClassVar[Cause] = "python"
    """The verdict's cause for the time of `inputs`, apart from reading files: "cpu decode" if `inputs` decodes."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the graph's outputs, in order; for example "images" and "labels"."""
        ...

    def in_epoch(self, epoch: int) -> Self:
        """Return the pipeline of the steps that count to this epoch: the size of images may depend on it.

        Its `inputs`, `compute_crops` and `sample` are used in these steps. The graph is built once, by the pipeline
        of the first step: what differs must be an input of the graph.
        """
        return self

    def inputs(self, source: AnySource, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Inputs:
        """Return the inputs of the graph for these samples.

        It is called in advance, on several threads at once. Files are paths if DALI reads them (`dali_reads`), so that
        their bytes do not pass through Python; otherwise they are contents.

        `epochs` are keys of random numbers: the epoch, and from bit 32 on the repeat (`MicroBatch.draw_keys`).
        """
        ...

    def unfit(self, shapes: Sequence[NDArray[np.int64]], inputs: Inputs) -> NDArray[np.bool_]:
        """Return for which samples (N,) `sample` raises an error although their images can be decoded.

        See `compute_crops` for the arguments.
        """
        return np.zeros(len(shapes[0]), np.bool_)

    def compute_crops(self, shapes: Sequence[NDArray[np.int64]], inputs: Inputs, device: Device) -> Inputs:
        """Return the graph's inputs that follow the files, when the shapes of the images are known.

        Args:
            shapes: for each of the `image_files`, height and width (N, 2) after EXIF orientation.
            inputs: the inputs that follow the image files.
            device: where the graph will run.
        """
        return inputs

    def graph(self, source: AnySource, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Build the DALI graph (fn calls on DataNodes) and return its outputs; images are 8-bit HWC.

        Args:
            source: the samples.
            inputs: the nodes of `inputs`; with `image_files`, the files' contents and the result of `compute_crops`.
            device: where the graph runs.
        """
        ...

    def finish(self, tensors: dict[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
        """Return the tensors of a batch as the loader yields them, from the tensors of the graph or of `sample`.

        The loader calls it in the training thread when the tensors are on the device of training.
        """
        return tensors

    def sample(self, source: AnySource, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return one sample, made by Pillow and torchvision on the CPU, for `--loader torch` and for checks.

        The outputs are the same as the graph's, but images are CHW.
        """
        ...
