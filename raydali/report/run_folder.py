"""The folder of a run, STORAGE/NAME/, on a local disk or an object store.

config.json     settings and the facts about the data that a resume is checked against
epochs.jsonl    a line an epoch; written by rank 0, before the checkpoint that covers it
events.jsonl    starts, resumes, failures, the end; written by the driver
samples/        with --trace-samples: which rank trained on which id at which step (samples.py)
best/           the weights with the best validation so far
checkpoint_*/   Ray Train's checkpoints
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pyarrow import fs as arrow_fs

from raydali.errors import UsageError

Row = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """One run's folder.

    Args:
        storage: where runs are kept: a folder (`~` is understood) or a URI such as `s3://bucket/runs`.
        name: the run's name.
    """

    storage: str
    name: str

    def __post_init__(self) -> None:
        if not self.name or self.name in (".", "..") or "/" in self.name:
            raise UsageError(f"--name {self.name!r} cannot name a folder: use letters, digits, dots and dashes")

    @cached_property
    def _place(self) -> tuple[arrow_fs.FileSystem, str]:
        if "://" in self.storage:
            filesystem, path = arrow_fs.FileSystem.from_uri(self.storage)
            return filesystem, f"{path.rstrip('/')}/{self.name}"
        return arrow_fs.LocalFileSystem(), os.path.join(self.uri_of_storage, self.name)

    @property
    def uri_of_storage(self) -> str:
        """The storage as Ray Train takes it: an absolute path or a URI."""
        return self.storage if "://" in self.storage else os.path.abspath(os.path.expanduser(self.storage))

    @property
    def filesystem(self) -> arrow_fs.FileSystem:
        """Where the folder lies."""
        return self._place[0]

    def path(self, file: str = "") -> str:
        """A file's path on the filesystem; the folder's own without an argument."""
        return f"{self._place[1]}/{file}".rstrip("/")

    def __str__(self) -> str:
        return f"{self.uri_of_storage.rstrip('/')}/{self.name}"

    def create(self) -> None:
        """Make the folder.

        Raises:
            UsageError: the storage cannot be written to.
        """
        try:
            self.filesystem.create_dir(self.path(), recursive=True)
            self.write("config.json.probe", b"")
            self.filesystem.delete_file(self.path("config.json.probe"))
        except OSError as error:
            raise UsageError(f"--storage {self.storage} cannot be written to: {error}") from error

    def exists(self, file: str) -> bool:
        """Whether there is such a file."""
        return bool(self.filesystem.get_file_info(self.path(file)).type != arrow_fs.FileType.NotFound)

    def files(self, folder: str) -> list[str]:
        """Names of the files of a sub-folder, sorted; none where it does not exist."""
        selector = arrow_fs.FileSelector(self.path(folder), allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector) if info.is_file)

    def read(self, file: str) -> bytes:
        """A file's contents."""
        with self.filesystem.open_input_stream(self.path(file)) as stream:
            return bytes(stream.read())

    def write(self, file: str, contents: bytes) -> None:
        """Write a whole file; readers see the old one or the new one, never a part."""
        target = self.path(file)
        if isinstance(self.filesystem, arrow_fs.LocalFileSystem):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            partial = f"{target}.partial-{os.getpid()}"
            with open(partial, "wb") as stream:
                stream.write(contents)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, target)
            return
        with self.filesystem.open_output_stream(target) as stream:
            stream.write(contents)

    def read_json(self, file: str) -> Any:
        """A JSON file's value."""
        return json.loads(self.read(file))

    def write_json(self, file: str, value: Any) -> None:
        """Write a value as an indented JSON file."""
        self.write(file, (json.dumps(value, indent=2) + "\n").encode())

    def rows(self, file: str) -> list[Row]:
        """The rows of a JSONL file, none where it does not exist; a last line cut short by a crash is left out."""
        if not self.exists(file):
            return []
        rows = []
        for line in self.read(file).splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def append(self, file: str, row: Row) -> None:
        """Add a row to a JSONL file. Object stores cannot append: there the file, which is small, is rewritten."""
        line = (json.dumps(row) + "\n").encode()
        if isinstance(self.filesystem, arrow_fs.LocalFileSystem):
            with open(self.path(file), "ab") as stream:
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
        else:
            self.write(file, (self.read(file) if self.exists(file) else b"") + line)

    def keep_rows(self, file: str, keep: Callable[[Row], bool]) -> None:
        """Drop the rows of a JSONL file that a resume will write again."""
        rows = self.rows(file)
        kept = [row for row in rows if keep(row)]
        if self.exists(file) and (len(kept) < len(rows) or not self.read(file).endswith(b"\n")):
            self.write(file, b"".join((json.dumps(row) + "\n").encode() for row in kept))
