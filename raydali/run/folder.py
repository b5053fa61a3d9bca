"""The folder of a run, STORAGE/NAME/, on a local disk or an object store.

config.json     settings, and the facts about the data that a resume is checked against
data_contents.npz  what the files of the data contain (data_contents.py)
model.json      how to build the model, its classes and its inputs; the best epoch and score (model_file.py)
attempt.json    the driver and worker group that own the folder (attempt.py)
epochs.jsonl    a row per epoch; written by rank 0 before the checkpoint that covers it
events.jsonl    starts, resumes, failures, the end (events.py); written by the driver
samples/        with --trace-samples: which rank trained on which sample at which step (sample_trace.py)
traces/         with --profile-steps: what each rank did in these steps (training/profiling.py)
tensorboard/    the numbers of each epoch, for TensorBoard; written by the driver (report/tensorboard.py)
tracking.json   with --track: the ids of the run in other programs (report/tracking.py)
samples.png     in restoration: input, output and target of some test images (report/comparison_grid.py)
report.html     a report of the run as one page, updated during the run; written by the driver (report/html/live.py)
ledger.json     what the workers' time went to, over all starts; written by the driver (ledger.py)
evaluation.json what `raydali evaluate` found last, and worst.png (commands/evaluate.py)
compile_cache/  what torch.compile has made, for nodes that lack it (compile_cache.py)
best/           the weights with the best validation score so far (model_file.py)
checkpoint_*/   checkpoints (checkpoints.py)

If a storage does not answer, calls are retried for a minute (data/read/reading.py). Writes to local disks are not
retried at once, but repeated with the next checkpoint or event.
"""

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import fs as arrow_fs

from raydali.data.read.reading import STORAGE_ERRNOS, errno_of, is_transient, with_retry
from raydali.data.read.storage import file_system, reason, refuse_secrets
from raydali.errors import StorageAway, UsageError
from raydali.host.interrupts import deferred_signals
from raydali.run import local_files

USUAL_STORAGE = "~/raydali-runs"
"""The folder of all runs, where --storage names no other."""
CONFIG, EPOCHS, EVENTS = "config.json", "epochs.jsonl", "events.jsonl"
FORM = 1
"""The `form` in config.json: a run with another one is refused. A new setting with a default changes no form."""
REPORT, SAMPLES = "report.html", "samples.png"
EVALUATION, WORST = "evaluation.json", "worst.png"

Row = dict[str, Any]
Json = Any
"""A value as `json.loads` returns it."""
T = TypeVar("T")


def _ignore(*_: str) -> None:
    pass


@dataclass(frozen=True)
class RunFolder:
    """A run's folder. It can be pickled, but then loses `warn` and `fence`.

    Args:
        storage: the folder of all runs (`~` is expanded), or a URI such as `s3://bucket/runs`.
        name: the run's name.
        warn: called with a line of text if the storage does not answer.
        fence: called before each write, rename and deletion; it may raise an exception to prevent them.

    Raises:
        UsageError: the name cannot be a folder's name, or the storage's URI contains a key.
    """

    storage: str
    name: str
    warn: Callable[[str], None] = field(default=_ignore, repr=False, compare=False)
    fence: Callable[[], None] = field(default=_ignore, repr=False, compare=False)
    uri_of_storage: str = field(init=False, repr=False)
    """The storage as Ray Train expects it: an absolute path or a URI."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise UsageError(f"--name {self.name!r} cannot name a folder: use letters, digits, dots, dashes and _")
        refuse_secrets(self.storage)
        # Expand now: another process may have another working or home directory. Symbolic links are not resolved.
        uri = self.storage if "://" in self.storage else os.path.abspath(os.path.expanduser(self.storage))  # noqa: PTH100, PTH111
        object.__setattr__(self, "uri_of_storage", uri)

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFolder, (self.uri_of_storage, self.name)

    @cached_property
    def _location(self) -> tuple[arrow_fs.FileSystem, str]:
        uri = self.uri_of_storage
        if uri.startswith("gs://") and "?" not in uri:
            uri += "?retry_limit_seconds=20"  # limit of a single call; the default is 15 minutes
        try:
            filesystem, path = arrow_fs.FileSystem.from_uri(uri)
            if uri.startswith("s3://") and "?" not in uri:
                filesystem = file_system(uri)  # which waits for longer than pyarrow's own
        except (OSError, ValueError, ImportError) as error:
            if uri.startswith("s3://") and is_transient(error):  # pyarrow asks S3 for the bucket's region
                raise
            remedy = "check its name, credentials and endpoint"
            raise UsageError(f"--storage {self.storage} cannot be reached: {remedy}: {error}") from error
        return filesystem, f"{path.rstrip('/')}/{self.name}"

    @property
    def filesystem(self) -> arrow_fs.FileSystem:
        """The file system that holds the folder."""
        return self._location[0]

    @property
    def _local(self) -> bool:
        return "://" not in self.uri_of_storage or self.uri_of_storage.startswith("file://")

    def _with_retry(self, call: Callable[[], T]) -> T:
        return with_retry(call, str(self), self.warn, self.is_transient)

    def is_transient(self, error: Exception) -> bool:
        """Return whether an error of this storage may be temporary."""
        return errno_of(error) in STORAGE_ERRNOS if self._local else is_transient(error)

    @contextmanager
    def must_answer(self) -> Iterator[None]:
        """Raise StorageAway inside this context if the storage does not answer for a minute."""
        try:
            yield
        except OSError as error:
            if not self.is_transient(error):
                raise
            raise StorageAway(f"{self} does not answer: {reason(error)}") from error

    def path(self, file: str = "") -> str:
        """Return the path of a file on the file system; without an argument, the path of the folder."""
        return f"{self._location[1]}/{file}".rstrip("/")

    def __str__(self) -> str:
        return f"{self.uri_of_storage.rstrip('/')}/{self.name}"

    def remove_if_empty(self) -> None:
        """Remove the folder if it is empty; errors are ignored."""
        with suppress(OSError):
            if not self.filesystem.get_file_info(arrow_fs.FileSelector(self.path())):
                self.filesystem.delete_dir(self.path())

    def create(self) -> None:
        """Create the folder of the run.

        Raises:
            UsageError: the storage cannot be written to.
        """
        try:
            self.filesystem.create_dir(self.path(), recursive=True)
            self.write("config.json.probe", b"")
            self.filesystem.delete_file(self.path("config.json.probe"))
        except OSError as error:
            remedy = "correct that, or give another for a new run"
            raise UsageError(f"--storage {self.storage} cannot be written: {reason(error)}; {remedy}") from error

    def exists(self, file: str) -> bool:
        """Return whether the file exists."""
        info = self._with_retry(lambda: self.filesystem.get_file_info(self.path(file)))
        return bool(info.type != arrow_fs.FileType.NotFound)

    def files(self, folder: str) -> list[str]:
        """Return the names of the files in a sub-folder, sorted; none if it does not exist."""
        return sorted(info.base_name for info in self.infos(folder) if info.is_file)

    def folders(self) -> list[str]:
        """Return the names of the sub-folders, sorted."""
        return sorted(info.base_name for info in self.infos("") if not info.is_file)

    def infos(self, folder: str) -> list[arrow_fs.FileInfo]:
        """Return what is known of the contents of a sub-folder; nothing if it does not exist."""
        selector = arrow_fs.FileSelector(self.path(folder), allow_not_found=True)
        infos: list[arrow_fs.FileInfo] = self._with_retry(lambda: self.filesystem.get_file_info(selector))
        return infos

    def read(self, file: str) -> bytes:
        """Return the contents of a file."""

        def contents() -> bytes:
            with self.filesystem.open_input_file(self.path(file)) as stream:  # a stream would read blocks of 64 KB
                return bytes(stream.read())

        return self._with_retry(contents)

    def write(self, file: str, contents: bytes | memoryview) -> None:
        """Write a whole file durably. Readers see the old contents or the new contents, never a part.

        Raises:
            OSError: the file cannot be written, and keeps its old contents. On a local disk this also happens if the
                run's folder no longer exists.
        """

        def store() -> None:
            self.fence()  # at each attempt
            with deferred_signals(), self.filesystem.open_output_stream(self.path(file), compression=None) as stream:
                stream.write(contents)

        if self._local:
            self.fence()
            local_files.replace(self._local_path(file), contents)
        else:
            self._with_retry(store)

    def _local_path(self, file: str) -> Path:
        path = Path(self.path(file))
        local_files.make_parent(path, Path(self.path()))
        return path

    def rename(self, file: str, new: str) -> None:
        """Give a file another name."""
        self.fence()
        self._with_retry(lambda: self.filesystem.move(self.path(file), self.path(new)))

    def remove(self, file: str) -> None:
        """Delete a file of the folder."""
        self.fence()
        self._with_retry(lambda: self.filesystem.delete_file(self.path(file)))

    def remove_folder(self, folder: str) -> None:
        """Delete a sub-folder with its contents."""
        self.fence()
        self._with_retry(lambda: self.filesystem.delete_dir(self.path(folder)))

    def read_json(self, file: str) -> Json:
        """Return the value of a JSON file."""
        return json.loads(self.read(file))

    def write_json(self, file: str, value: object) -> None:
        """Write a value as an indented JSON file."""
        self.write(file, _indented(value))

    def remove_partial_files(self) -> None:
        """Remove local files that killed processes have not completed; object stores have no such files."""
        if self._local:
            local_files.remove_partial(Path(self.path()))

    def create_json(self, file: str, value: object) -> None:
        """Write a JSON file that must not exist yet.

        On an object store this is not atomic, because pyarrow has no such operation: two concurrent writers may both
        succeed.

        Raises:
            FileExistsError: the file exists.
        """
        if self._local:
            local_files.create(self._local_path(file), _indented(value))
        elif self.exists(file):
            raise FileExistsError(errno.EEXIST, "It exists", self.path(file))
        else:
            self.write_json(file, value)

    def rows(self, file: str) -> list[Row]:
        """Return the rows of a JSONL file, without an incomplete last line; none if the file does not exist.

        Raises:
            UsageError: another line is not valid JSON.
        """
        return list(self.each_row(file))

    def each_row(self, file: str) -> Iterator[Row]:
        """Yield the same rows one by one: parsed rows take many times the memory of the file.

        Raises:
            UsageError: a line other than the last is not valid JSON.
        """
        *lines, rest = self.read(file).split(b"\n") if self.exists(file) else [b""]
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UsageError(f"{self}/{file}, line {number} is broken: {error}; correct or delete it") from error
        with suppress(ValueError):  # a part of a row is not valid JSON: valid JSON lacks only its newline
            yield json.loads(rest)

    def extend(self, file: str, contents: bytes) -> None:
        """Append to a file, or create it. Object stores rewrite the whole file, so it should be small."""
        if self._local:
            self.fence()
            local_files.append(self._local_path(file), contents)
        else:
            self.write(file, (self.read(file) if self.exists(file) else b"") + contents)

    def append(self, file: str, row: Row) -> None:
        """Append a row to a JSONL file, which should be small: see `extend`."""
        if self._local and local_files.ends_with_newline(Path(self.path(file))):
            self.extend(file, _lines([row]))
        else:  # a row must not continue an incomplete line
            self.write(file, _lines([*self.rows(file), row]))

    def keep_rows(self, file: str, keep: Callable[[Row], bool]) -> list[Row]:
        """Drop the rows of a JSONL file for which `keep` returns False: a resume writes them again. Return the rest."""
        rows = self.rows(file)
        kept = [row for row in rows if keep(row)]
        if len(kept) < len(rows):
            self.write(file, _lines(kept))
        return kept


def _indented(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _lines(rows: Iterable[Row]) -> bytes:
    return b"".join(json.dumps(_finite(row), allow_nan=False).encode() + b"\n" for row in rows)


def _finite(value: Json) -> Json:
    """Replace NaN and infinities by None, since JSON does not have them."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
