"""Image files that end the process that decodes them, and stand-ins for a screening that lets them through.

No plain file is known to do so. A JPEG with two EXIF blocks that disagree ends DALI's process, but it is not plain.
"""

import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from raydali.data.broken import screening
from raydali.data.decode import decoder_choice, pillow

TURNS = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0%c\0\0\0\0\0\0\0"
"""A block of EXIF with this orientation."""


def killer() -> bytes:
    """A JPEG on which DALI's decoder fails with SIGSEGV."""
    from tests.support.broken import jpeg  # it imports PyTorch, which a decoder's process would wait for

    blocks = b"".join(b"\xff\xe1" + struct.pack(">H", len(TURNS) + 1) + TURNS % turn for turn in (6, 3))
    data = jpeg((400, 300))
    return data[:2] + blocks + data[2:]


_decoded: list[bytes] = []
true_shape, true_decoded = decoder_choice.plain_shape, pillow._decoded_here


def is_killer(data: "memoryview | bytes") -> bool:
    """Whether these are the contents of a `killer`."""
    return bytes(data[:200]).count(b"Exif") > 1


def let_killers_through(set: Callable[[object, str, object], None] = setattr) -> None:
    """Take such a file for a plain one in this process."""

    def shape(data: memoryview) -> decoder_choice.Shape | None:
        return (400, 300) if is_killer(data) else true_shape(data)

    set(screening, "plain_shape", shape)
    set(pillow, "plain_shape", shape)


def die_of_killers() -> None:
    """Let such files through, and have this process die of each that DALI gets, even if DALI decodes a crop of it."""
    from raydali.data.load.dali_loader import DaliLoader
    from raydali.data.tasks.pipeline import Inputs

    let_killers_through()
    true_feed = DaliLoader._feed

    def feed(self: DaliLoader) -> Inputs:
        inputs = true_feed(self)
        read = self._in_flight[-1].read
        if read is not None and any(is_killer(file.data) for files in read.files for file in files):
            signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)
            time.sleep(100)  # until it is handled: the thread in which a decoder fails does nothing more
        return inputs

    vars_of: Any = DaliLoader
    vars_of._feed = feed


def dies_late(files: Sequence[bytes], *_: object) -> dict[int, str]:
    """Die of a killer that is the first file of this process, a child; of another one, at the next file.

    DALI's process dies late now and then: a killer damages its memory.
    """
    if any(map(is_killer, _decoded)) or (is_killer(files[0]) and not _decoded):
        os.kill(os.getpid(), signal.SIGSEGV)
    _decoded.extend(files)
    return {}


def dies_of_killers(data: bytes) -> Image.Image:
    """Decode as Pillow does, if Pillow died of such a file."""
    if is_killer(data):
        os.kill(os.getpid(), signal.SIGSEGV)
    return true_decoded(data)


def pixels_of(data: bytes) -> pillow.Pixels:
    """Decode in a child process, which finds this function by its name."""
    pillow._decoded_here = dies_of_killers
    return pillow.decoded_pixels(data)
