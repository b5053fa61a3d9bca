"""The Ray that RAY_ADDRESS names: ask for an answer before Ray is, which waits minutes for one."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from raydali.errors import UsageError
from raydali.text import error_line

ANSWER_SECONDS = 5.0
"""Time limit of a TCP connection to the address."""


@contextmanager
def answering_ray() -> Iterator[None]:
    """Connect to the Ray that RAY_ADDRESS names in this context, once something listens there.

    Raises:
        UsageError: nothing does, or the connection fails.
    """
    from ray._private.services import canonicalize_bootstrap_address

    address = os.environ["RAY_ADDRESS"]
    try:
        found = address if "://" in address else f"ray://{canonicalize_bootstrap_address(address)}"
        place = urlsplit(found)
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), ANSWER_SECONDS).close()
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"no Ray answers at RAY_ADDRESS={address} ({error_line(error)}): unset it, start Ray there, or check "
            "RAY_AUTH_MODE and the token"
        ) from error
