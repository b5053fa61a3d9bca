"""Folders of the built-in data sets, which are made once in the user's cache."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from raydali.data.sources.cache import cache_folder
from raydali.errors import UsageError


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
            f"cannot write built-in data to {folder}: {error.strerror}; "
            f"set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return str(folder)
