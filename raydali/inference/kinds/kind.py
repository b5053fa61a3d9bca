"""The interface of a kind of prediction: what a job's file does not say of its samples and outputs.

open_labeled          other samples with their truth      evaluate --data
open_unlabeled        samples without                     predict
outputs               on each worker: the network's outputs for a batch, to arrays with a row for each sample
evaluation, table     in the driver: the arrays of all samples to figures of each class and so on, or to rows
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raydali.data.loading.loader import Batch
from raydali.data.tasks.pipeline import Pipeline

WORST_SHOWN = 64
"""Samples of `Evaluation.worst`."""
Arrays = dict[str, Any]
"""Outputs by name, NDArray, or lists of a task of the user; "ids" are those of the samples, int64 (n,)."""
Columns = Mapping[str, str | None]
"""How a list is read, by option: "root" and "label_column"."""


@dataclass(frozen=True)
class Worst:
    """A sample that the model gets wrong, or least right.

    Attributes:
        id: in its source.
        path: of the sample.
        truth: what it is.
        predicted: what the model says, with its probability.
        loss: of the sample; None if the model has none for each sample.
    """

    id: int
    path: str
    truth: str
    predicted: str
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a model is on some samples, beside the figures of the job's own evaluation.

    Attributes:
        metrics: further figures over all samples, by name.
        classes: a row of figures for each class, with its "class"; empty if there are no classes.
        confusion: int64 (C, C), how many samples of the class of the row were predicted as that of the column; None
            where a sample may have several classes.
        worst: the samples that the model gets most wrong, the worst first.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    classes: Sequence[Mapping[str, Any]] = ()
    confusion: NDArray[np.int64] | None = None
    worst: Sequence[Worst] = ()


def text_of(path: str) -> str:
    """Return a path as text, of which bytes that are not UTF-8 are escaped."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


class Kind(ABC):
    """A kind of prediction.

    Attributes:
        noun: what a sample is called, such as "image".
        endings: those of files of predictions; "": a folder.
        legend: what is written below the pictures of the worst samples.
    """

    noun: ClassVar[str] = "image"
    endings: ClassVar[tuple[str, ...]] = (".csv", ".parquet")
    legend: ClassVar[str] = "Below each: its class, the class and probability that the model gives, and the loss."

    @abstractmethod
    def open_labeled(self, data: str, config: Any, classes: Sequence[str] | None, given: Columns) -> Any:
        """Open other samples, with their truth.

        Args:
            data: what the user gives.
            config: the options of the run, for how samples are read.
            classes: the classes of the run; None if it does not say them.
            given: what the user gives for lists, in place of the run's column.

        Raises:
            UsageError: they cannot be opened, or have other classes.
        """

    @abstractmethod
    def open_unlabeled(self, data: str, root: str | None, config: Any, classes: Sequence[str]) -> Any:
        """Open other samples without their truth, in the order of their listing.

        Args:
            data: what the user gives.
            root: the folder of relative paths in a list; None: the list's.
            config: the options of the run, for how samples are read.
            classes: the classes of the run.

        Raises:
            UsageError: they cannot be opened.
        """

    def for_prediction(self, pipeline: Pipeline[Any]) -> "tuple[Kind, Pipeline[Any], int | None]":
        """Return the kind, the pipeline and the batch size of samples without truth; None: the run's batch size."""
        return self, pipeline, None

    def files(self, arrays: Arrays, source: Any) -> Iterator[tuple[str, bytes]]:
        """Yield the files that a prediction consists of, with their paths in the output's folder."""
        yield from ()

    def edges(self, source: Any) -> NDArray[np.int64] | None:
        """Return the ids at which a part may begin, see `parts.cut`; None: any."""
        return None

    @abstractmethod
    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return tensors, or lists, with a row for each sample or object.

        Args:
            raw: what the network returned for the batch, on the device.
            batch: the batch.
            source: its samples.
        """

    @abstractmethod
    def evaluation(self, arrays: Arrays, source: Any, classes: Sequence[str]) -> Evaluation:
        """Compare the outputs for samples, in the order of their ids, with their truth."""

    def picture(self, pipeline: Pipeline[Any], source: Any, id: int, arrays: Arrays) -> NDArray[np.uint8]:
        """Return a sample of `Evaluation.worst` as the model sees it, (height, width, 3), decoded in this process."""
        image: NDArray[np.uint8] = pipeline.sample(source, id, 0)[0].permute(1, 2, 0).numpy()
        return image

    @abstractmethod
    def table(self, arrays: Arrays, source: Any, classes: Sequence[str]) -> pa.Table:
        """Return the predictions for samples, with a row for each sample, or for each object in one."""
