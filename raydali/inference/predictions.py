"""Keeps the predictions of a run on disk: parts that are done, and at the end one file.

    predictions.csv.parts/identity.json       the run, its weights and the samples
                          part-000017.parquet the rows of a part, and its broken samples
    predictions.csv                           all rows in the order of the samples
    predictions.csv.broken.csv                path and reason of the samples that could not be read, if any

Each file appears at once, whole. A command that was interrupted goes on with the parts that are missing.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from raydali.data.broken.quarantine import none_read
from raydali.errors import CommandError, UsageError
from raydali.inference.engine import PartResult
from raydali.inference.parts import Part
from raydali.inference.task_results.task_results import TaskResults
from raydali.run import local_files
from raydali.text import printable

IDENTITY = "identity.json"
_BROKEN = b"broken"
_QUOTED = csv.WriteOptions(quoting_style="needed")


class Predictions:
    """The output of `raydali predict`.

    Args:
        output: the file of all rows; without an ending, a folder for files.
        identity: what the predictions depend on; parts of another one are refused.

    Raises:
        UsageError: the output exists, or its parts belong to something else, or it cannot be written.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any]) -> None:
        self.output = output
        self._folder = output.with_name(f"{output.name}.parts")
        earlier = self._known()
        if earlier is None:
            if output.is_dir() and any(output.iterdir()) if not output.suffix else output.exists():
                raise UsageError(f"--output {output} exists: give another one, or remove it")
            try:
                self._folder.mkdir(exist_ok=True)
                local_files.replace(self._folder / IDENTITY, json.dumps(identity, indent=2).encode())
            except OSError as error:
                raise UsageError(f"--output {output} cannot be written: {error.strerror}; give another") from error
        elif earlier != identity:
            differing = [name for name in identity if earlier.get(name) != identity[name]]
            raise UsageError(
                f"{self._folder} is of another command ({', '.join(differing)}): remove it, or give another --output"
            )

    def _known(self) -> Any:  # noqa: ANN401 (JSON)
        try:
            return json.loads((self._folder / IDENTITY).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"{self._folder} is broken ({error}): remove it, or give another --output") from error

    def missing(self, parts: Sequence[Part]) -> list[Part]:
        """Return the parts that are not done yet."""
        done = {path.name for path in self._folder.glob("part-*.parquet")}
        return [part for part in parts if self._path(part).name not in done]

    def _path(self, part: Part) -> Path:
        return self._folder / f"part-{part.number:06d}.parquet"

    def write_part(self, result: PartResult, task_results: TaskResults) -> None:
        """Write the rows of a part, after the files that belong to them.

        Raises:
            CommandError: the disk does not take them; what is done stays.
        """
        rows = pa.table({})
        with self._writing():
            if result.arrays:
                rows, files = task_results.table(result.arrays), result.arrays.get("files", [])
                if bool(files) == bool(self.output.suffix):
                    wanted = "a folder" if files else "a file that ends in .csv or .parquet"
                    shutil.rmtree(self._folder)
                    raise UsageError(f"--output {self.output} does not suit the predictions of this job: give {wanted}")
                for name, content in files:
                    path = self.output / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    local_files.replace(path, content)
            broken = json.dumps([*result.broken.values()])
            sink = pa.BufferOutputStream()
            parquet.write_table(rows.replace_schema_metadata({_BROKEN: broken}), sink)
            local_files.replace(self._path(result.part), memoryview(sink.getvalue()))

    def join(self, parts: Sequence[Part], categories: Mapping[str, int]) -> tuple[int, list[tuple[str, str]]]:
        """Write the rows of all parts into the output, and remove the parts.

        Args:
            parts: all parts.
            categories: the ids of the classes in COCO's annotations, for an output that ends in .json.

        Returns:
            The number of rows, and path and reason of the broken samples.

        Raises:
            DataError: no sample could be read.
            CommandError: the disk does not take them; what is done stays.
        """
        broken = [(path, reason) for part in parts for path, reason in self._broken(part)]
        with self._writing():
            if broken:
                lines = pa.Table.from_pylist(
                    [{"path": printable(path), "reason": printable(why)} for path, why in broken]
                )
                list_of_broken = self.output.with_name(f"{self.output.name}.broken.csv")
                with local_files.partial_file(list_of_broken) as path:
                    csv.write_csv(lines, path, _QUOTED)
                    path.replace(list_of_broken)
            every = (parquet.read_table(self._path(part)).replace_schema_metadata(None) for part in parts)
            read = (table for table in every if table.num_columns)
            first = next(read, None)
            if first is None:
                raise none_read(f"{path}: {reason}" for path, reason in broken)
            tables = chain([first], read)
            if self.output.suffix:
                with local_files.partial_file(self.output) as path:
                    rows = _write(path, self.output.suffix, first.schema, tables, categories)
                    path.replace(self.output)
            else:
                rows = sum(table.num_rows for table in tables)
            shutil.rmtree(self._folder)
        return rows, broken

    def _broken(self, part: Part) -> list[tuple[str, str]]:
        metadata = parquet.read_schema(self._path(part)).metadata
        return [(path, reason) for path, reason in json.loads(metadata[_BROKEN])]

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CommandError(
                f"{self.output} cannot be written ({error.strerror or error}): the same command goes on from the parts "
                "that are done"
            ) from error


def _write(
    path: Path, ending: str, schema: pa.Schema, tables: Iterable[pa.Table], categories: Mapping[str, int]
) -> int:
    """Write tables, one after another, into a file of the kind that the ending names; return the number of rows."""
    if ending == ".json":
        results = [row for table in tables for row in _coco_results(table, categories)]
        path.write_text(json.dumps(results))
        return len(results)
    rows = 0
    is_csv = ending == ".csv"
    with csv.CSVWriter(path, schema, write_options=_QUOTED) if is_csv else parquet.ParquetWriter(path, schema) as file:
        for table in tables:
            file.write_table(table)
            rows += table.num_rows
    return rows


def _coco_results(table: pa.Table, categories: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Yield detections in the format of results at https://cocodataset.org/#format-results, with their files."""
    ids = {printable(name): id for name, id in categories.items()}
    for row in table.to_pylist():
        yield {
            "image_id": row["image"],
            "file_name": row["path"],
            "category_id": ids[row["label"]],
            "bbox": [round(row[name], 2) for name in ("x", "y", "width", "height")],
            "score": row["score"],
        }
