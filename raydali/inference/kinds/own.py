"""A task of the user's own: the job's file says all that is known of it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, ClassVar

import pyarrow as pa

from raydali.data.loading.loader import Batch
from raydali.data.sources.formats import unlabeled_files
from raydali.data.sources.labeled import IMAGE_EXTENSIONS
from raydali.data.tasks import classification
from raydali.data.tasks.pipeline import Pipeline
from raydali.data.tasks.restoration import WholeImages
from raydali.errors import UsageError
from raydali.inference.kinds.kind import Arrays, Columns, Evaluation, Kind, text_of
from raydali.inference.labeled_data import unlabeled
from raydali.launch.job import Job


class OwnTask(Kind):
    """A task without more figures than those of the job's evaluation; `predictions` of the job predicts.

    Args:
        job: the job.
        config: its options.
        predicts: whether outputs become predictions.
    """

    noun: ClassVar[str] = "sample"
    endings: ClassVar[tuple[str, ...]] = (".csv", ".parquet", "")

    def __init__(self, job: Job[Any], config: Any, *, predicts: bool = False) -> None:
        self._job, self._config, self._predicts = job, config, predicts

    def open_labeled(self, data: str, config: Any, classes: Sequence[str] | None, given: Columns) -> Any:
        """See `Kind`: the validation set of the job's `open_data` with this --data."""
        return self._job.open_data(replace(config, data=data)).val

    def open_unlabeled(self, data: str, root: str | None, config: Any, classes: Sequence[str]) -> Any:
        """See `Kind`."""
        if isinstance(self._job.val_pipeline(config), classification.Images):
            return unlabeled(data, config, classes, root)
        return unlabeled_files(data, root, IMAGE_EXTENSIONS)

    def for_prediction(self, pipeline: Pipeline[Any]) -> tuple[Kind, Pipeline[Any], int | None]:
        """Take whole images, one at a time, unless the job's pipeline makes images of one size of labelled ones."""
        kind = OwnTask(self._job, self._config, predicts=True)
        if isinstance(pipeline, classification.Images):
            return kind, pipeline, None
        return kind, WholeImages(), 1

    def outputs(self, raw: Any, batch: Batch, source: Any) -> dict[str, Any]:
        """Return the columns, or names and contents of files, that `predictions` returns; in an evaluation nothing."""
        if not self._predicts or self._job.predictions is None:
            return {}
        paths = [text_of(source.path(id)) for id in batch.ids.tolist()]
        found = dict(self._job.predictions(self._config, raw, paths))
        if found and all(isinstance(value, bytes) for value in found.values()):
            return {"names": [_relative(name, source) for name in found], "files": [*found.values()]}
        columns = {"path": paths} | {name: list(values) for name, values in found.items()}
        if wrong := [name for name, values in columns.items() if len(values) != len(paths)]:
            raise UsageError(f"predictions() returns {len(columns[wrong[0]])} of {wrong[0]!r} for {len(paths)} samples")
        return columns

    def evaluation(self, arrays: Arrays, source: Any, classes: Sequence[str]) -> Evaluation:
        """Return nothing: all figures are those of the job's evaluation."""
        return Evaluation()

    def files(self, arrays: Arrays, source: Any) -> Iterator[tuple[str, bytes]]:
        """See `Kind`."""
        yield from zip(arrays.get("names", ()), arrays.get("files", ()), strict=True)

    def table(self, arrays: Arrays, source: Any, classes: Sequence[str]) -> pa.Table:
        """Return a row for each sample, or for each file its name."""
        columns: dict[str, Any] = {name: values for name, values in arrays.items() if name not in ("ids", "files")}
        return pa.table(columns)


def _relative(name: object, source: Any) -> str:
    """Return the path of a file in the output's folder: below it as the sample lies below the data's root."""
    path, root = str(name), getattr(source, "root", "")
    return path.removeprefix(f"{root}/") if root and path.startswith(f"{root}/") else PurePosixPath(path).name
