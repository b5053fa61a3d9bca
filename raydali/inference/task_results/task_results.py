"""Defines kinds of predictions, and the two that need no classes: what a job's file leaves open of samples and outputs.

open_labeled          other samples with their truth      evaluate --data
open_unlabeled        samples without                     predict
outputs               on each worker: the network's outputs for a batch, to arrays with a row for each sample
evaluation, table     in the driver: the arrays of all samples to figures of each class and so on, or to rows
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raydali.data.index.formats import unlabeled_files
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import IMAGE_EXTENSIONS
from raydali.data.load.loader import Batch
from raydali.data.tasks import classification
from raydali.data.tasks.pipeline import Pipeline
from raydali.data.tasks.restoration import WholeImages
from raydali.data.tasks.settings import DecoderSettings
from raydali.errors import UsageError
from raydali.inference.samples import unlabeled
from raydali.inference.worst import worst_of
from raydali.launch.job import Job
from raydali.text import printable
from raydali.training.evaluation.restoration import per_image

Arrays = dict[str, Any]
"""Outputs by name, NDArray or lists; "ids" has the ids of the samples, int64 (n,)."""
Columns = Mapping[str, str | None]
"""How a list is read, by option: "root" and "label_column"."""


class TaskResults:
    """A kind of prediction. This one knows no task: its figures come from the job's evaluation alone.

    Args:
        job: the job.
        config: its options.
        pipeline: the job's, of validation samples.
        predictions: `Job.predictions` or a function like it, which makes predictions of outputs; None: to evaluate. For
            predictions, whole images are taken one at a time, unless the pipeline makes images of one size of labelled
            ones.

    Attributes:
        noun: what a sample is called, such as "image".
        endings: endings of files of predictions; "": a folder.
        legend: what is written below the pictures of the worst samples.
        pipeline: of the samples.
        batch_size: samples of a batch; None: as in the run.
    """

    noun: ClassVar[str] = "sample"
    endings: ClassVar[tuple[str, ...]] = (".csv", ".parquet", "")
    legend: ClassVar[str] = "Below each: its class, the class and probability that the model gives, and the loss."

    def __init__(self, job: Job[Any], config: Any, pipeline: Pipeline[Any], predictions: Any = None) -> None:
        self.job, self.config, self.pipeline, self._predictions = job, config, pipeline, predictions
        self.batch_size: int | None = None
        if predictions is not None and not isinstance(pipeline, classification.Images):
            self.pipeline, self.batch_size = WholeImages(), 1
            if isinstance(pipeline, DecoderSettings):
                load, largest = pipeline.hw_decoder_load, pipeline.largest_image
                self.pipeline = WholeImages(hw_decoder_load=load, largest_image=largest)

    def open_labeled(self, data: str, classes: Sequence[str] | None, columns: Columns) -> Any:
        """Open other samples, with their truth.

        Args:
            data: what the user gives.
            classes: the classes of the run; None if it does not say them.
            columns: what the user gives for lists, in place of the run's column.

        Raises:
            UsageError: they cannot be opened, or have other classes.
        """
        return self.job.open_data(replace(self.config, data=data)).val

    def open_unlabeled(self, data: str, root: str | None, classes: Sequence[str]) -> Any:
        """Open other samples without their truth, in the order of their listing.

        Args:
            data: what the user gives.
            root: the folder of relative paths in a list; None: the list's.
            classes: the classes of the run.

        Raises:
            UsageError: they cannot be opened.
        """
        if isinstance(self.pipeline, classification.Images):
            return unlabeled(data, self.config, classes, root)
        return unlabeled_files(data, root, IMAGE_EXTENSIONS)

    def edges(self, source: Any) -> NDArray[np.int64] | None:
        """Return the ids at which a part may begin, see `parts.cut`; None: any."""
        return None

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return tensors, or lists, with a row for each sample or object.

        This class returns "columns", one for the batch, or "files" with their names, as `predictions` says.

        Args:
            raw: what the network returned for the batch, on the device.
            batch: the batch.
            source: its samples.
        """
        if self._predictions is None:
            return {}
        paths = [printable(source.path(id)) for id in batch.ids.tolist()]
        predictions = dict(self._predictions(self.config, raw, paths))
        if predictions and all(isinstance(value, bytes) for value in predictions.values()):
            return {"files": [(_relative(name, source), content) for name, content in predictions.items()]}
        columns = {"path": paths} | {name: list(values) for name, values in predictions.items()}
        if wrong := [name for name, values in columns.items() if len(values) != len(paths)]:
            raise UsageError(f"predictions() returns {len(columns[wrong[0]])} of {wrong[0]!r} for {len(paths)} samples")
        return {"columns": [columns]}

    def evaluation(self, arrays: Arrays, source: Any, classes: Sequence[str]) -> dict[str, Any]:
        """Compare the outputs for samples, in the order of their ids, with their truth.

        Returns:
            What evaluation.json has beside the figures of the job's evaluation: further "metrics", a row of figures for
            each of "classes", and the "worst" samples, see `worst_of`.
        """
        return {"metrics": {}, "classes": [], "worst": []}

    def picture(self, source: Any, id: int, arrays: Arrays) -> NDArray[np.uint8]:
        """Return one of the worst samples as the model sees it, (height, width, 3), decoded in this process."""
        image: NDArray[np.uint8] = self.pipeline.sample(source, id, 0)[0].permute(1, 2, 0).numpy()
        return image

    def table(self, arrays: Arrays, source: Any, classes: Sequence[str]) -> pa.Table:
        """Return the predictions for samples, with a row for each sample, object or file."""
        if "files" in arrays:
            return pa.table({"file": [name for name, _ in arrays["files"]]})
        columns = arrays["columns"]
        return pa.table({name: [value for batch in columns for value in batch[name]] for name in columns[0]})


class Restoration(TaskResults):
    """Restored images; the outputs are their figures against the targets."""

    noun = "pair"
    legend = "The inputs. Below each: its PSNR, the PSNR of the model's output, and the loss."

    def open_labeled(self, data: str, classes: Sequence[str] | None, columns: Columns) -> ImagePairs:
        return ImagePairs.scan(data, self.config.inputs, self.config.targets)

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return "psnr", "ssim", "input_psnr" and "losses", each (n,)."""
        return per_image(raw, batch["inputs"], batch["targets"])

    def evaluation(self, arrays: Arrays, source: ImagePairs, classes: Sequence[str]) -> dict[str, Any]:
        """Find the worst images."""

        def words(place: int) -> tuple[str, str]:
            return f"input {arrays['input_psnr'][place]:.1f} dB", f"output {arrays['psnr'][place]:.1f} dB"

        worst = worst_of(arrays, -arrays["psnr"], source.inputs.path, words)
        return {"metrics": {}, "classes": [], "worst": worst}


def _relative(name: object, source: Any) -> str:
    """Return the path of a file in the output's folder: below it as the sample lies below the data's root."""
    path, root = str(name), printable(getattr(source, "root", ""))
    return path.removeprefix(f"{root}/") if root and path.startswith(f"{root}/") else PurePosixPath(path).name
