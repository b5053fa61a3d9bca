"""The folder of a run, STORAGE/NAME/, on a local disk or an object store.

config.json     settings and the facts about the data that a resume is checked against
attempt.json    whose the folder is: the newest driver's and worker group's (attempt.py of raydali.launch)
epochs.jsonl    a line an epoch; written by rank 0, before the checkpoint that covers it
events.jsonl    starts, resumes, failures, the end; written by the driver
samples/        with --trace-samples: which rank trained on which id at which step (sample_trace.py)
traces/         with --profile-steps: what each rank did in these steps (profiling.py of raydali.train)
tensorboard/    the numbers of each epoch, for TensorBoard; written by the driver (tensorboard.py)
tracking.json   with --track: the ids of the run in other programs (tracking.py)
samples.png     of restoration: some test images as input, output and truth (report/comparison_grid.py)
report.html     all of it as one page, now and then while the run goes on; written by the driver (report/html/live.py)
best/           the weights with the best validation so far
checkpoint_*/   checkpoints (checkpoints.py of raydali.train)

Calls that a storage does not answer are repeated for a minute (patience.py of raydali.data); not so writes to local
disks, which come again with the next checkpoint or event.
"""

import errno
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pyarrow import fs as arrow_fs

from raydali.data.sources.retry import STORAGE_ERRNOS, errno_of, is_transient, with_retry
from raydali.data.sources.storage import reason, refuse_secrets
from raydali.errors import StorageAway, UsageError
from raydali.host.interrupts import deferred_signals

CONFIG, EPOCHS, EVENTS = "config.json", "epochs.jsonl", "events.jsonl"
REPORT, SAMPLES = "report.html", "samples.png"
PARTIAL = ".partial-"
"""In the names of local files that are being written."""

Row = dict[str, Any]
T = TypeVar("T")


def _unheard(_: str) -> None:
    pass


def _unfenced() -> None:
    pass


@dataclass(frozen=True)
class RunFolder:
    """One run's folder; the same one in whatever process it is passed to.

    Args:
        storage: where runs are kept: a folder (`~` is understood) or a URI such as `s3://bucket/runs`.
        name: the run's name.
        warn: hears of a storage that does not answer; stays behind in this process.
        fence: is called before anything is written, renamed or deleted, and may refuse it; stays behind, too.

    Raises:
        UsageError: the name cannot name a folder, or the storage's URI holds a key.
    """

    storage: str
    name: str
    warn: Callable[[str], None] = field(default=_unheard, repr=False, compare=False)
    fence: Callable[[], None] = field(default=_unfenced, repr=False, compare=False)
    uri_of_storage: str = field(init=False, repr=False)
    """The storage as Ray Train takes it: an absolute path or a URI."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name):
            raise UsageError(
                f"--name {self.name!r} cannot name a folder: use letters, digits, dots, dashes and underscores"
            )
        refuse_secrets(self.storage)
        # Now, because another process may have another working directory and another home.
        uri = self.storage if "://" in self.storage else os.path.abspath(os.path.expanduser(self.storage))
        object.__setattr__(self, "uri_of_storage", uri)

    def __reduce__(self) -> tuple[Any, ...]:
        return RunFolder, (self.uri_of_storage, self.name)

    @cached_property
    def _place(self) -> tuple[arrow_fs.FileSystem, str]:
        uri = self.uri_of_storage
        if uri.startswith("gs://") and "?" not in uri:
            uri += "?retry_limit_seconds=20"  # of a single call; its default is a quarter of an hour
        try:
            filesystem, path = arrow_fs.FileSystem.from_uri(uri)
        except (OSError, ValueError, ImportError) as error:
            raise UsageError(
                f"--storage {self.storage} cannot be reached: check its name, credentials and endpoint: {error}"
            ) from error
        return filesystem, f"{path.rstrip('/')}/{self.name}"

    @property
    def filesystem(self) -> arrow_fs.FileSystem:
        """Where the folder lies."""
        return self._place[0]

    @property
    def _local(self) -> bool:
        return isinstance(self.filesystem, arrow_fs.LocalFileSystem)

    def _patiently(self, call: Callable[[], T]) -> T:
        return with_retry(call, str(self), self.warn, self.is_transient)

    def is_transient(self, error: Exception) -> bool:
        """Return whether an error of this storage may pass."""
        return errno_of(error) in STORAGE_ERRNOS if self._local else is_transient(error)

    @contextmanager
    def must_answer(self) -> Iterator[None]:
        """Inside, calls that this storage does not answer, for a minute, end with StorageAway."""
        try:
            yield
        except OSError as error:
            if not self.is_transient(error):
                raise
            raise StorageAway(f"{self} does not answer: {reason(error)}") from error

    def path(self, file: str = "") -> str:
        """A file's path on the filesystem; the folder's own without an argument."""
        return f"{self._place[1]}/{file}".rstrip("/")

    def __str__(self) -> str:
        return f"{self.uri_of_storage.rstrip('/')}/{self.name}"

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing lies in it; what hinders that is no error."""
        with suppress(OSError):
            if not self.filesystem.get_file_info(arrow_fs.FileSelector(self.path())):
                self.filesystem.delete_dir(self.path())

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
            raise UsageError(
                f"--storage {self.storage} cannot be written to, give one that can: {reason(error)}"
            ) from error

    def exists(self, file: str) -> bool:
        """Whether there is such a file."""
        info = self._patiently(lambda: self.filesystem.get_file_info(self.path(file)))
        return bool(info.type != arrow_fs.FileType.NotFound)

    def files(self, folder: str) -> list[str]:
        """Names of the files of a sub-folder, sorted; none where it does not exist."""
        return sorted(info.base_name for info in self._infos(folder) if info.is_file)

    def folders(self) -> list[str]:
        """Names of the folders in it, sorted."""
        return sorted(info.base_name for info in self._infos("") if not info.is_file)

    def _infos(self, folder: str) -> list[arrow_fs.FileInfo]:
        selector = arrow_fs.FileSelector(self.path(folder), allow_not_found=True)
        infos: list[arrow_fs.FileInfo] = self._patiently(lambda: self.filesystem.get_file_info(selector))
        return infos

    def read(self, file: str) -> bytes:
        """A file's contents."""

        def contents() -> bytes:
            # Not as a stream: of an object store that asks for 64 KB at a time.
            with self.filesystem.open_input_file(self.path(file)) as stream:
                return bytes(stream.read())

        return self._patiently(contents)

    def write(self, file: str, contents: bytes | memoryview) -> None:
        """Write a whole file, durably; readers see the old one or the new one, never a part.

        Raises:
            OSError: it cannot be written; the old one stays. On a local disk also where the run's folder is gone.
        """

        def store() -> None:
            self.fence()  # each time that it is tried
            with deferred_signals(), self.filesystem.open_output_stream(self.path(file), compression=None) as stream:
                stream.write(contents)

        if self._local:
            self.fence()
            _replace(self._made_way(file), contents)
        else:
            self._patiently(store)

    def _made_way(self, file: str) -> str:
        """The path of a local file, in a sub-folder that is made. The run's own folder is not: where the disk that it
        lay on is unmounted, what is written would silently lie elsewhere."""
        path = self.path(file)
        parent = os.path.dirname(path)
        if not os.path.isdir(parent):
            if not os.path.isdir(self.path()):
                raise FileNotFoundError(errno.ENOENT, "The folder of the run is gone", self.path())
            os.makedirs(parent, exist_ok=True)
            _sync_folder(os.path.dirname(parent))
        return path

    def rename(self, file: str, new: str) -> None:
        """Give a file another name."""
        self.fence()
        move = self.filesystem.move
        self._patiently(lambda: move(self.path(file), self.path(new)))

    def remove(self, file: str) -> None:
        """Delete a file."""
        self.fence()
        self._patiently(lambda: self.filesystem.delete_file(self.path(file)))

    def remove_folder(self, folder: str) -> None:
        """Delete a sub-folder and all that is in it."""
        self.fence()
        self._patiently(lambda: self.filesystem.delete_dir(self.path(folder)))

    def read_json(self, file: str) -> Any:
        """A JSON file's value."""
        return json.loads(self.read(file))

    def write_json(self, file: str, value: Any) -> None:
        """Write a value as an indented JSON file."""
        self.write(file, _indented(value))

    def remove_partial_files(self) -> None:
        """Remove what killed processes left of local files that they were writing; of those that still do, the write
        fails. What hinders that is no error. Object stores keep such parts out of sight."""
        if self._local:
            for path in Path(self.path()).rglob(f"*{PARTIAL}*"):
                with suppress(OSError):
                    path.unlink()

    def create_json(self, file: str, value: Any) -> None:
        """Write a JSON file that must not exist yet.

        pyarrow cannot ask an object store to refuse, so it is looked at before: of two writers at the same moment both
        may succeed there.

        Raises:
            FileExistsError: it exists.
        """
        if self._local:
            _create(self._made_way(file), _indented(value))
        elif self.exists(file):
            raise FileExistsError(errno.EEXIST, "It exists", self.path(file))
        else:
            self.write_json(file, value)

    def rows(self, file: str) -> list[Row]:
        """The rows of a JSONL file, none where it does not exist; a last line cut short by a crash is left out.

        Raises:
            UsageError: another line is broken.
        """
        return list(self.each_row(file))

    def each_row(self, file: str) -> Iterator[Row]:
        """The same rows, one after the other: parsed they take many times the memory that the file does.

        Raises:
            UsageError: a line but the last is broken.
        """
        *lines, rest = self.read(file).split(b"\n") if self.exists(file) else [b""]
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise UsageError(f"{self}/{file}, line {number} is broken: {error}; mend or delete it") from error
        with suppress(ValueError):  # no part of a row is JSON, so what can be read lacks no more than its newline
            yield json.loads(rest)

    def extend(self, file: str, contents: bytes) -> None:
        """Add to the end of a file, which need not exist; on object stores it is rewritten, so only for small ones."""
        if self._local:
            self.fence()
            # Without a buffer, which closing would try to write once more.
            with open(self._made_way(file), "ab", buffering=0) as stream, _restored(stream.fileno()):
                rest = memoryview(contents)
                while rest:
                    rest = rest[stream.write(rest) :]
                os.fsync(stream.fileno())
        else:
            self.write(file, (self.read(file) if self.exists(file) else b"") + contents)

    def append(self, file: str, row: Row) -> None:
        """Add a row to a JSONL file. Object stores cannot append: there the file, which is small, is rewritten."""
        if self._local and self._is_ended(file):
            self.extend(file, _lines([row]))
        else:  # a line that was cut short, too, must not run into the new one
            self.write(file, _lines([*self.rows(file), row]))

    def _is_ended(self, file: str) -> bool:
        """Return whether a local file is there and its last line has its end."""
        with suppress(FileNotFoundError), open(self.path(file), "rb") as stream:
            if stream.seek(0, os.SEEK_END):
                stream.seek(-1, os.SEEK_END)
                return stream.read() == b"\n"
        return False

    def keep_rows(self, file: str, keep: Callable[[Row], bool]) -> None:
        """Drop the rows of a JSONL file that a resume will write again."""
        rows = self.rows(file)
        kept = [row for row in rows if keep(row)]
        if len(kept) < len(rows):
            self.write(file, _lines(kept))


def _replace(target: str, contents: bytes | memoryview) -> None:
    """Write a local file beside the target, then put it in its place."""
    partial = _partial(target)
    try:
        _write_durably(partial, contents)
        os.replace(partial, target)
    except BaseException:  # a full disk, say, which must not stay full of this
        with suppress(OSError):
            os.remove(partial)
        raise
    _sync_folder(os.path.dirname(target))


def _create(target: str, contents: bytes) -> None:
    """Write a local file that is there whole, or was there before, which is an error."""
    partial = _partial(target)
    try:
        _write_durably(partial, contents)
        try:
            os.link(partial, target)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            with open(target, "xb") as stream:
                stream.write(contents)
    finally:
        with suppress(OSError):
            os.remove(partial)
    _sync_folder(os.path.dirname(target))


def _partial(target: str) -> str:
    """A name of its own: processes of two containers may have one number."""
    return f"{target}{PARTIAL}{os.getpid()}-{secrets.token_hex(4)}"


def _write_durably(path: str, contents: bytes | memoryview) -> None:
    with open(path, "wb") as stream:
        stream.write(contents)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: str) -> None:
    """Make the names in a local folder durable, where its file system knows how to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _restored(descriptor: int) -> Iterator[None]:
    """Cut an open file back to its length where adding to it fails half-way."""
    length = os.fstat(descriptor).st_size
    try:
        yield
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, length)
        raise


def _indented(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _lines(rows: Iterable[Row]) -> bytes:
    return b"".join(json.dumps(_finite(row), allow_nan=False).encode() + b"\n" for row in rows)


def _finite(value: Any) -> Any:
    """The value with null for NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
