"""Defines what is made of a network's outputs: without a task, for restored images, and as a job's `predictions` says.

outputs               on each worker: the network's outputs for a batch, to arrays with a row for each sample
evaluation, table     in the driver: the arrays of all samples to figures of each class and so on, or to rows

The job's file says all else: data, network, pipeline, and the figures of its evaluation.
"""

import logging
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raydali.data.index.image_pairs import ImagePairs
from raydali.data.load.loader import Batch
from raydali.data.tasks import classification
from raydali.data.tasks.restoration import ValidationPairs, WholeImages
from raydali.data.tasks.settings import DecoderSettings
from raydali.errors import UsageError
from raydali.inference.trained_run import TrainedRun
from raydali.inference.worst import worst_of
from raydali.options.subjects import MultiLabelOptions
from raydali.text import printable
from raydali.training.evaluation.restoration import per_image, restored_files

Arrays = dict[str, Any]
"""Outputs by name, NDArray or lists; "ids" has the ids of the samples, int64 (n,)."""

_log = logging.getLogger(__name__)


class TaskResults:
    """The results of a run for some samples. These know no task: the figures are those of the job's evaluation.

    Args:
        run: the trained run.
        source: the samples.
        classes: in the order of the model's outputs; none if it has no output for each.

    Attributes:
        noun: what a sample is called, such as "image".
        endings: endings of files of predictions; "": a folder.
        legend: what is written below the pictures of the worst samples.
        batch_size: samples of a batch; None: as in the run.
        pipeline: of the samples.
    """

    noun: ClassVar[str] = "sample"
    endings: ClassVar[tuple[str, ...]] = (".csv", ".parquet", "")
    legend: ClassVar[str] = "Below each: its class, the class and probability that the model gives, and the loss."
    batch_size: int | None = None
    source: Any

    def __init__(self, run: TrainedRun, source: Any, classes: Sequence[str]) -> None:
        self.pipeline, self.source, self.classes = run.pipeline, source, classes

    def edges(self) -> NDArray[np.int64] | None:
        """Return the ids at which a part may begin, see `parts.cut`; None: any."""
        return None

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return tensors, or lists, with a row for each sample or object.

        Args:
            raw: what the network returned for the batch, on the device.
            batch: the batch.
        """
        return {}

    def evaluation(self, arrays: Arrays) -> dict[str, Any]:
        """Compare the outputs for samples, in the order of their ids, with their truth.

        Returns:
            What evaluation.json has beside the figures of the job's evaluation: further "metrics", a row of figures for
            each of "classes", and the "worst" samples, see `worst_of`.
        """
        return {"metrics": {}, "classes": [], "worst": []}

    def picture(self, id: int, arrays: Arrays) -> NDArray[np.uint8]:
        """Return one of the worst samples as the model sees it, (height, width, 3), decoded in this process."""
        image: NDArray[np.uint8] = self.pipeline.sample(self.source, id, 0)[0].permute(1, 2, 0).numpy()
        return image

    def table(self, arrays: Arrays) -> pa.Table:
        """Return the predictions for samples, with a row for each sample, object or file."""
        raise NotImplementedError


class Restoration(TaskResults):
    """Restored images; the outputs are their figures against the targets."""

    noun = "pair"
    legend = "The inputs. Below each: its PSNR, the PSNR of the model's output, and the loss."
    source: ImagePairs

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return "psnr", "ssim", "input_psnr" and "losses", each (n,)."""
        return per_image(raw, batch["inputs"], batch["targets"])

    def evaluation(self, arrays: Arrays) -> dict[str, Any]:
        """Find the worst images."""

        def words(place: int) -> tuple[str, str]:
            return f"input {arrays['input_psnr'][place]:.1f} dB", f"output {arrays['psnr'][place]:.1f} dB"

        worst = worst_of(arrays, -arrays["psnr"], self.source.inputs.path, words)
        return {"metrics": {}, "classes": [], "worst": worst}


class JobPredictions(TaskResults):
    """The results that the job's `predictions` makes of the outputs; without it, restored images as PNG files.

    Whole images are taken one at a time, unless the pipeline makes images of one size of labelled ones.
    """

    def __init__(self, run: TrainedRun, source: Any, classes: Sequence[str]) -> None:
        super().__init__(run, source, classes)
        self._predictions = partial(run.job.predictions or restored_files, run.config)
        if not isinstance(run.pipeline, classification.Images):
            self.pipeline, self.batch_size = WholeImages(), 1
            if isinstance(run.pipeline, DecoderSettings):
                load, largest = run.pipeline.hw_decoder_load, run.pipeline.largest_image
                self.pipeline = WholeImages(hw_decoder_load=load, largest_image=largest)

    def outputs(self, raw: Any, batch: Batch) -> dict[str, Any]:
        """Return "columns", one for the batch, or "files" with their names."""
        paths = [printable(self.source.path(id)) for id in batch.ids.tolist()]
        predictions = dict(self._predictions(raw, paths))
        if predictions and all(isinstance(value, bytes) for value in predictions.values()):
            return {"files": [(self._relative(name), content) for name, content in predictions.items()]}
        columns = {"path": paths} | {name: list(values) for name, values in predictions.items()}
        if wrong := [name for name, values in columns.items() if len(values) != len(paths)]:
            raise UsageError(f"predictions() returns {len(columns[wrong[0]])} of {wrong[0]!r} for {len(paths)} samples")
        return {"columns": [columns]}

    def _relative(self, name: object) -> str:
        """Return the path of a file in the output's folder: below it as the sample lies below the data's root."""
        path, root = str(name), printable(getattr(self.source, "root", ""))
        return path.removeprefix(f"{root}/") if root and path.startswith(f"{root}/") else PurePosixPath(path).name

    def table(self, arrays: Arrays) -> pa.Table:
        if "files" in arrays:
            return pa.table({"file": [name for name, _ in arrays["files"]]})
        columns = arrays["columns"]
        return pa.table({name: [value for batch in columns for value in batch[name]] for name in columns[0]})


def results_class(run: TrainedRun) -> type[TaskResults]:
    """Return the class of the results of a run's task; only its module is imported."""
    task = run.job.task
    if task is None:
        return TaskResults
    several = task == "classification" and isinstance(run.config, MultiLabelOptions) and run.config.multi_label
    place = {"video": "classification", "restoration": "task_results"}.get(task, task)
    module = import_module(f"{__package__}.{place}")
    found: type[TaskResults] = getattr(module, "MultiLabel" if several else task.capitalize())
    return found


def predictions_class(run: TrainedRun) -> type[TaskResults]:
    """Return the class of the results that `raydali predict` writes."""
    if run.job.task == "restoration" and type(run.pipeline) is not ValidationPairs:
        name = type(run.pipeline).__name__
        _log.warning("whole images are decoded as ValidationPairs does, and not by %s of the job", name)
    return results_class(run) if run.job.predictions is None and run.job.task != "restoration" else JobPredictions
