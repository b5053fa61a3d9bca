"""Keeps what the files of a run's data contain, so that a resume and an evaluation can compare it.

A fingerprint has names and labels: two class folders that exchange their names have the same one. So a run keeps, by
the fingerprint, the versions of all files where their index has them, else of a keyed sample of `FILES`; and a hash of
both ends of `CONTENTS` files. Times do not count: a copy is the same data.
"""

import io
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.files import Files, digest
from raydali.data.index.shards import Shards
from raydali.data.index.source import Source
from raydali.data.read import storage
from raydali.data.read.storage import ObjectPart
from raydali.data.stream.counter_rng import keyed
from raydali.errors import UsageError
from raydali.run.folder import RunFolder
from raydali.text import plural, summarize

DATA_CONTENTS = "data_contents.npz"
FILES, CONTENTS = 1000, 64
"""Files whose versions are compared if the index has none, and files whose contents are."""
ENDS = 4096
"""Bytes at both ends of a file that are compared."""
_THREADS = 32
_SHOWN = 3

Contents = dict[str, NDArray[np.int64]]
"""By fingerprint and place of the index in its source, (M, 4): ids, versions, and hashes of both ends, 0 if unknown."""


def compared_contents(folder: RunFolder, sources: Iterable[Source]) -> tuple[str, Contents]:
    """Compare what files contain with what the run has kept of samples with the same names and labels.

    Returns:
        How many files contain something else, with three examples, or an empty text; and what the run has to keep:
        nothing if it has all of it.
    """
    kept: Contents = {}
    if folder.exists(DATA_CONTENTS):
        with np.load(io.BytesIO(folder.read(DATA_CONTENTS)), allow_pickle=False) as arrays:
            kept = dict(arrays)
    now: Contents = {}
    paths, changed, compared = list[str](), 0, 0
    for source in sources:
        for place, files in enumerate(indexes_of(source)):
            name = f"{source.fingerprint}.{place}"
            now[name] = _contents_of(files)
            if name in kept:
                ids, *rows = np.intersect1d(kept[name][:, 0], now[name][:, 0], True, return_indices=True)
                others = ids[_different(kept[name][rows[0], 1:], now[name][rows[1], 1:])]
                paths += map(files.path, others[:_SHOWN].tolist())
                changed, compared = changed + len(others), compared + len(ids)
    text = f"{changed:,} of {plural(compared, 'file')} ({summarize(paths, _SHOWN, total=changed)})" if changed else ""
    return text, now | kept if now.keys() - kept.keys() else {}


def check_contents(folder: RunFolder, *sources: Source) -> Contents:
    """Return what the run has to keep of its data.

    Raises:
        UsageError: files contain something else than when the run read them.
    """
    changed, contents = compared_contents(folder, sources)
    if changed:
        raise UsageError(
            f"{folder} cannot be resumed with other contents in {changed}: give the earlier ones, or another --name; "
            f"if these are right, remove its {DATA_CONTENTS}"
        )
    return contents


def contents_digest(source: Source) -> str:
    """Return a hash of the sizes of a sample of files, and of both ends of some."""
    arrays = (_contents_of(files)[:, [0, 1, 3]] for files in indexes_of(source))
    return digest(*(np.ascontiguousarray(array).data for array in arrays))


def write_contents(folder: RunFolder, contents: Contents) -> None:
    """Let a run keep the contents of its data, if there are any that it has not."""
    if not contents:
        return
    made = io.BytesIO()
    np.savez(made, allow_pickle=False, **contents)
    folder.write(DATA_CONTENTS, made.getbuffer())


def sample(number: int, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return one id in each of so many equal parts, or all if there are no more: so no large class is left out."""
    edges = np.linspace(0, len(ids), min(number, len(ids)) + 1).astype(np.int64)
    return ids[edges[:-1] + (keyed(len(ids), edges[:-1]) % np.diff(edges).astype(np.uint64)).astype(np.int64)]


def indexes_of(source: Source) -> list[Files | Shards]:
    """Return the indexes of a source: of pairs two; none if it is a user's own."""
    parts = [source, *(getattr(source, name, None) for name in ("inputs", "targets", "videos"))]
    return [part for part in parts if isinstance(part, Files | Shards)]


def _contents_of(files: Files | Shards) -> NDArray[np.int64]:
    """Return the `Contents` of an index, of all files or of a sample; what cannot be read is unknown."""
    ids, versions = np.arange(len(files)), files.versions
    sampled = sample(FILES, ids)
    few = sample(CONTENTS, sampled)
    with ThreadPoolExecutor(_THREADS) as threads:
        if versions is None:
            ids = sampled
            versions = np.array([*threads.map(storage.version_of, (part.uri for part in files.parts(ids)))], np.int64)
        contents = np.column_stack([ids, versions, np.zeros(len(ids), np.int64)])
        places = np.searchsorted(ids, few)
        contents[places, -1] = [*threads.map(_hash_of_ends, files.parts(few), contents[places, 1].tolist())]
    return contents


def _hash_of_ends(part: ObjectPart, size: int) -> int:
    """Return a positive hash of the first and the last bytes of a part; 0 if it cannot be read."""
    size = size if part.size is None else part.size
    length = size if part.length is None else part.length
    hashed = blake2b(digest_size=7)
    if length < 0:  # it is not there
        return 0
    try:
        for begin in sorted({0, max(0, length - ENDS)}):
            hashed.update(_read(part.uri, part.offset + begin, min(ENDS, length)))
    except OSError:
        return 0
    return int.from_bytes(hashed.digest()) + 1


def _read(path: str, offset: int, length: int) -> bytes | memoryview:
    if "://" in path:
        return storage.fetch(ObjectPart(path, offset, length))[0]
    with Path(path).open("rb", buffering=0) as file:
        return os.pread(file.fileno(), length, offset)


def _different(was: NDArray[np.int64], now: NDArray[np.int64]) -> NDArray[np.intp]:
    # Negative numbers are times. If all ETags are others, the store is another one, or encrypts in another way.
    unknown = [*storage.UNKNOWN, 0]
    comparable = (was > unknown) & (now > unknown)
    different = comparable & (was != now)
    different[:, 1] &= not different[comparable[:, 1], 1].all()
    return np.flatnonzero(different.any(1))
