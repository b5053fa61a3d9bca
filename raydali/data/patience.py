"""Calls to a storage that are repeated while it does not answer: of data, checkpoints and a run's folder."""

import errno
import random
import re
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from raydali.data.object_store import reason

SECONDS = 60.0
"""How long a call is repeated, from its first failure on."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_REFUSALS = re.compile(r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET|HTTP status 40[0-7]")
STORAGE_ERRNOS = {
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ENODEV", "ENXIO", "EBUSY", "EAGAIN", "EMFILE", "ENFILE", "ENOMEM", "EREMOTEIO"),
        *("ENOTCONN", "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "EHOSTDOWN", "EHOSTUNREACH"),
        *("ENETDOWN", "ENETUNREACH", "ETIMEDOUT", "EPIPE"),
    )
    if hasattr(errno, name)
}
"""What a disk or a file server answers that fails; it says nothing of a single file, and may pass."""

T = TypeVar("T")


def is_transient(error: BaseException) -> bool:
    """Whether the error of a storage may pass: not where it refuses, or has no such file.

    The innermost OSError of its causes decides. One without an errno is taken for an object store's.
    """
    cause: BaseException | None = error
    while cause is not None:
        error, cause = (cause if isinstance(cause, OSError) else error), cause.__cause__
    if not isinstance(error, OSError):
        return False
    if error.errno is not None:
        return error.errno in STORAGE_ERRNOS
    return not isinstance(error, FileNotFoundError | PermissionError) and not _REFUSALS.search(str(error))


def patiently(
    call: Callable[[], T], what: str, warn: Callable[[str], None], worth: Callable[[OSError], bool] = is_transient
) -> T:
    """What the call returns, which is made again for a minute, with pauses that double up to 15 s, while it fails.

    Args:
        what: is being done, for the warnings: one for each time that it is tried again.
        worth: which errors to try again after.

    Raises:
        OSError: the last one.
    """
    deadline = 0.0
    for number in count():
        try:
            return call()
        except OSError as error:
            deadline = deadline or time.monotonic() + SECONDS
            # Of many workers that failed at once, not all should come again at once.
            pause = min(_FIRST_PAUSE * 2**number, _LONGEST_PAUSE) * random.uniform(0.7, 1.0)
            if not worth(error) or time.monotonic() + pause > deadline:
                raise
            warn(f"{what} failed, trying again in {pause:.1f} s: {reason(error)}")
            time.sleep(pause)
    raise AssertionError("unreachable")
