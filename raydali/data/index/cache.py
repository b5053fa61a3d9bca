"""Caches indexes and built-in data, which raydali can make again.

Indexes are in the user's cache, and with the runs too once `cache_with_runs` names a storage: a pod starts with an
empty cache.
"""

import io
import logging
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.read import storage
from raydali.errors import UsageError

RUNS_CACHE = ".raydali-indexes"
"""The cache's folder in a storage of runs; no run can have this name."""

_log = logging.getLogger(__name__)
_storage: str | None = None


def cache_folder() -> Path:
    """Return `$XDG_CACHE_HOME/raydali`, or `~/.cache/raydali`; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "raydali"


def cache_with_runs(storage: str | None) -> None:
    """Use this storage of runs as a second cache of indexes from now on.

    Args:
        storage: a folder or a URI. Ignored if it is in the home folder (`~`), which lasts no longer than the user's
            cache, or a URI with options.
    """
    global _storage
    _storage = None if storage is None or storage.startswith("~") or "?" in storage else storage.rstrip("/")


def cached_arrays(name: str) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield the arrays cached under this name, from each cache; missing and incomplete files are skipped."""
    for folder in _folders():
        path = f"{folder}/{name}"
        try:
            with (
                io.BytesIO(storage.read(path)) if "://" in path else Path(path).open("rb") as file,
                np.load(file, allow_pickle=False) as loaded,
            ):
                arrays = {key: loaded[key] for key in loaded.files}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            continue
        yield arrays


def cache_arrays(name: str, **arrays: Any) -> None:
    """Store these arrays in each cache; one that cannot be written is no error."""
    for folder in _folders():
        path = f"{folder}/{name}"
        try:
            if "://" in path:
                made = io.BytesIO()
                np.savez(made, **arrays)
                with storage.file_system(path).open_output_stream(path.partition("://")[2]) as stream:
                    stream.write(made.getbuffer())
                continue
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=Path(path).parent) as temporary:
                np.savez(Path(temporary, "made.npz"), **arrays)
                Path(temporary, "made.npz").replace(path)
        except OSError as error:
            reason = storage.reason(error) if "://" in path else error.strerror
            _log.info("the index is not kept for the next run: cannot write %s: %s", path, reason)


def _folders() -> list[str]:
    return [str(cache_folder()), *([f"{_storage}/{RUNS_CACHE}"] if _storage is not None else [])]


def built_in_folder(name: str, write: Callable[[Path], None]) -> str:
    """Return the folder of this name in `$XDG_CACHE_HOME/raydali`, or `~/.cache/raydali`; the first call writes it.

    Several processes may call at once: each writes a temporary copy, and the first to rename its own wins.

    Args:
        name: must change with the content.
        write: makes a folder and fills it, with the same content each time.

    Raises:
        UsageError: the cache cannot be written.
    """
    cache = cache_folder()
    folder = cache / name
    if folder.is_dir():
        return str(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{name}.", dir=cache) as temporary:
            made = Path(temporary, "made")
            write(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise UsageError(
            f"cannot write built-in data to {folder}: {storage.not_permitted(error) or error.strerror}; "
            f"set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return str(folder)
