"""The interface of a task: what a loader reads for a sample, the inputs of a DALI graph, and the graph itself.

A task is a `Pipeline` for one kind of `Source`. The loaders (data/load/loader.py) use only this interface:

    ids --> files --> [ read, peek at shapes ] --> inputs --> graph --> tensors
                      the loader, on threads       numpy      DALI

The position of a crop depends on the shape of the image, which is in the file. The loader therefore reads the files of
a task first, and `inputs` then computes the crops of a whole batch with numpy. This is several times faster than in a
DALI graph.

classification.py is an example of a task. The driver also makes pipelines, to check their settings. Therefore torch and
DALI are only imported inside `graph` and `sample`.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.source import Readable, Source
from raydali.data.read.contents import Failed
from raydali.data.read.reading import Cause
from raydali.errors import UsageError

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode

Device = Literal["cpu", "gpu"]
Interpolation = Literal["bilinear", "bicubic"]
"""The filter that resizes images; it is widened where an image becomes smaller (antialiasing)."""
Inputs = tuple[Sequence[Any] | NDArray[Any], ...]
"""Inputs of a batch: each is a list of arrays or tensors, or an array with one row per sample."""
AnySource = TypeVar("AnySource", bound=Source, contravariant=True)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a batch, whose files a loader has read.

    Attributes:
        ids: int64 (N,).
        keys: int64 (N,), with seed and id the keys of random numbers: the epoch, and from bit 32 on the repeat.
        shapes: for each of the `image_files`, height and width (N, 2) after EXIF orientation.
        contents: of each further file of the task, the contents (N), uint8.
        device: where the graph runs.
    """

    ids: NDArray[np.int64]
    keys: NDArray[np.int64]
    shapes: Sequence[NDArray[np.int64]] = ()
    contents: Sequence[Sequence[NDArray[np.uint8]]] = ()
    device: Device = "cpu"

    @classmethod
    def one(cls, id: int, epoch: int, *shapes: Sequence[int], content: bytes | None = None) -> Self:
        """Return one sample, whose images have these heights and widths, as `Pipeline.sample` needs it."""
        contents = () if content is None else ([np.frombuffer(content, np.uint8)],)
        return cls(np.array([id]), np.array([epoch]), [np.array([shape]) for shape in shapes], contents)


class SampleErrors(Exception):  # noqa: N818 (it has several errors)
    """Some samples of a batch cannot be used.

    Attributes:
        errors: of each of these samples, by its place in the batch.
    """

    def __init__(self, errors: Mapping[int, Exception]) -> None:
        first = next(iter(errors.values()))
        super().__init__(str(first))
        self.errors, self.__cause__ = errors, first


def refuse(unfit: NDArray[np.bool_], reason: Callable[[int], Exception]) -> None:
    """Raise SampleErrors if any of N samples is unfit; `reason` returns the error of the sample at a place."""
    if unfit.any():
        raise SampleErrors({place: reason(place) for place in np.flatnonzero(unfit).tolist()})


def of_each(
    function: Callable[..., T], *columns: Iterable[Any], map: Callable[..., Iterable[T | Failed]] = map
) -> list[T]:
    """Return the results of a function, called with one value of each column per sample.

    Args:
        function: takes one sample's values.
        columns: the values of N samples.
        map: calls the function, for example on threads.

    Raises:
        SampleErrors: it failed for some samples.
        MemoryError: there is no memory for one.
    """

    def attempt(*values: Any) -> T | Failed:
        try:
            return function(*values)
        except MemoryError:
            raise
        except Exception as error:
            return Failed(error)

    results = [*map(attempt, *columns)]
    if errors := {place: result.error for place, result in enumerate(results) if isinstance(result, Failed)}:
        raise SampleErrors(errors)
    return results  # type: ignore[return-value]


class Pipeline(Protocol[AnySource]):
    """The base class of tasks, which convert the ids of a source to tensors.

    Random numbers may depend on (seed, epoch, id) only, so that all ranks make the same tensors.
    """

    image_files: ClassVar[int] = 0
    """The number of first `files` that are images, which the graph decodes."""
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

        Its `inputs` and `sample` are used in these steps. The graph is built once, by the pipeline of the first step:
        what differs must be an input of the graph.
        """
        return self

    def files(self, source: AnySource) -> Sequence[Readable]:
        """Return what the loader reads for the samples of a source, images first; nothing if `inputs` reads itself."""
        return ()

    def inputs(self, source: AnySource, samples: Samples) -> Inputs:
        """Return the inputs of the graph for these samples, without their image files.

        It is called in advance, on several threads at once.

        Raises:
            SampleErrors: some of them cannot be used: they are replaced, or left out. `of_each` and `refuse` raise it.
        """
        ...

    def graph(self, source: AnySource, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Build the DALI graph (fn calls on DataNodes) and return its outputs; images are 8-bit HWC.

        Args:
            source: the samples.
            inputs: the nodes of the image files' contents, and of `inputs`.
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


def check_form(pipeline: Pipeline[Any]) -> None:
    """Refuse a pipeline as it was written for raydali 0.2.0.

    Raises:
        UsageError: its `inputs` takes ids and epochs.
    """
    if len(inspect.signature(pipeline.inputs).parameters) == 3:
        raise UsageError(
            f"the pipeline {type(pipeline).__name__} has inputs(source, ids, epochs): write files(source) and "
            "inputs(source, samples), see docs/own-data.md"
        )
