"""Judges errors of reading a sample: whether the sample is broken, or its storage does not answer."""

from collections.abc import Callable

from raydali.data.sources.retry import STORAGE_ERRNOS, FolderAwayError, is_transient
from raydali.data.sources.storage import StoreError


def why_broken(load: Callable[[], object]) -> str | None:
    """Return why a sample cannot be read, on one line; None if it can. Arguments and errors are those of `refusal`."""
    error = refusal(load)
    return None if error is None else describe_error(error)


def refusal(load: Callable[[], object]) -> Exception | None:
    """Return the error of reading a sample; None if it can be read.

    Args:
        load: reads and decodes all of it on the host, as `Pipeline.sample` does.

    Raises:
        OSError, DataError, MemoryError: the storage did not answer; the sample is not to blame.
    """
    try:
        load()
    except MemoryError:
        raise
    except Exception as error:
        if of_storage(error):
            raise
        return error
    return None


def describe_error(error: Exception) -> str:
    """Return an error on one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def of_storage(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is the storage's."""
    while error is not None:
        if isinstance(error, StoreError | FolderAwayError):
            return True
        if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
            return True
        error = error.__cause__
    return False


def may_pass(error: BaseException) -> bool:
    """Return whether an error of reading a sample is the storage's and may be transient."""
    return of_storage(error) and is_transient(error)
