"""TFRecord files, and how many records each holds: what DALI's own reader needs to know of them.

Only that reader parses TFRecord, and it does not say which record it gives. So what the stream of ids promises of other
sources does not hold for it: tfrecord_loader.py says what is left. To have it all, repack as tar shards.
"""

import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.cache import cache_folder
from raydali.data.files import digest
from raydali.data.patterns import FoundFile, find_files
from raydali.errors import UsageError

_NAME = re.compile(r"\.tfrecord|-of-\d+$")
_THREADS = 32
_BEFORE, _AFTER = 12, 4  # bytes around a record: its length and a checksum; another one


@dataclass(frozen=True, eq=False)
class TFRecords:
    """N records in F local files. Made by `scan`.

    Attributes:
        paths: of the files, absolute, sorted.
        index_paths: of DALI's index of each, in the cache.
        counts: int64 (F,), the records of each.
    """

    paths: tuple[str, ...]
    index_paths: tuple[str, ...]
    counts: NDArray[np.int64]

    @classmethod
    def scan(cls, pattern: str) -> Self:
        """The records of some files; indexes those that have no index in the cache yet, as DALI's tfrecord2idx does.

        Every node calls this for itself, since DALI reads the indexes.

        Args:
            pattern: as `patterns.find_files` takes it, such as `train-*-of-01024` or `train-{00..99}.tfrecord`; local.

        Raises:
            UsageError: files that are missing, remote, cut off, or no TFRecord files; no records; a cache that cannot
                be written.
        """
        if "://" in pattern:
            raise UsageError(f"cannot read TFRecord files at {pattern}: copy them to a local folder")
        root, files = find_files(pattern)
        folder = cache_folder() / "tfrecord"
        with ThreadPoolExecutor(_THREADS) as threads:
            made = [*threads.map(lambda file: _index(f"{root}/{file.name}", file, folder), files)]
        if not sum(count for _, count in made):
            raise UsageError(f"no records in the {len(files)} files {pattern}: give others")
        return cls(
            paths=tuple(f"{root}/{file.name}" for file in files),
            index_paths=tuple(path for path, _ in made),
            counts=np.array([count for _, count in made]),
        )

    def __len__(self) -> int:
        """N."""
        return int(self.counts.sum())

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits of the files' names and their counts; not of where they lie."""
        names = "\0".join(map(os.path.basename, self.paths))
        return digest(os.fsencode(names), self.counts.astype("<i8").data)


def names_tfrecords(data: str) -> bool:
    """Whether this is the name or the pattern of TFRecord files, and not of a folder."""
    return bool(_NAME.search(data.rpartition("/")[2])) and not os.path.isdir(os.path.expanduser(data))


def refuse_tfrecords(data: str) -> None:
    """Refuses TFRecord files where a source of the stream is asked for.

    Raises:
        UsageError: with the reason, and what to do instead.
    """
    if names_tfrecords(data):
        raise UsageError(
            f"{data} names TFRecord files: DALI's reader gives no ids for them, so neither each sample exactly once "
            f"nor a resume inside an epoch can be promised: use raydali.data.tfrecord_loader in a loop of your own, "
            f"or write tar shards"
        )


def _index(path: str, file: FoundFile, folder: Path) -> tuple[str, int]:
    """The path of a file's index, and the number of its lines: OFFSET LENGTH for each record."""
    place = folder / f"{digest(os.fsencode(path), f'{file.size} {file.written}'.encode())}.idx"
    try:
        return str(place), place.read_bytes().count(b"\n")
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unwritable(place, error) from error
    lines = _lines(path, file.size)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as temporary:
            made = Path(temporary, place.name)
            made.write_text("".join(lines))
            os.replace(made, place)
    except OSError as error:
        raise _unwritable(place, error) from error
    return str(place), len(lines)


def _unwritable(place: Path, error: OSError) -> UsageError:
    return UsageError(
        f"DALI needs an index of TFRecord files, but {place} cannot be written: {error.strerror}; "
        f"set XDG_CACHE_HOME to a folder that can be"
    )


def _lines(path: str, size: int) -> list[str]:
    lines: list[str] = []
    try:
        with open(path, "rb", buffering=0) as file:
            position = 0
            while position < size:
                file.seek(position)
                before = file.read(_BEFORE)
                length = struct.unpack("<Q", before[:8])[0] if len(before) == _BEFORE else size
                if position + _BEFORE + length + _AFTER > size:
                    raise UsageError(
                        f"{path} is no TFRecord file, a compressed one, or cut off: record {len(lines)}, at byte "
                        f"{position} of {size}, would end behind it: write it again"
                    )
                lines.append(f"{position} {_BEFORE + length + _AFTER}\n")
                position += _BEFORE + length + _AFTER
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; make it readable") from error
    return lines
