"""Calls to an object store, made again after a pause where they failed in passing."""

import random
import re
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from raydali.data.object_store import reason

SECONDS = 60.0
"""How long a call is made again, from its first failure on."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 15.0
_REFUSALS = re.compile(r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET|HTTP status 40[0-7]")

T = TypeVar("T")


def in_passing(error: OSError) -> bool:
    """Whether a store's error may be gone in a moment: not where it says no, or has no such file."""
    return not isinstance(error, FileNotFoundError | PermissionError) and not _REFUSALS.search(str(error))


def patiently(
    call: Callable[[], T], what: str, warn: Callable[[str], None], worth: Callable[[OSError], bool] = in_passing
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
