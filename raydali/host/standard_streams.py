"""Lets this process outlive the readers of its output: the program behind a pipe, or a terminal."""

import atexit
import errno
import io
import operator
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from raydali.errors import CommandError
from raydali.host.background import Background

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Output(io.FileIO):
    """The bytes of standard output or standard error; they are lost if their reader has gone away."""

    call: Callable[[Callable[[], None]], object] = operator.call

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all bytes, and return their number; raise a CommandError if their disk is full, for example."""
        content = bytes(data)
        self.call(partial(self._write, content))
        return len(content)

    def _write(self, content: bytes) -> None:
        try:
            while content:
                content = content[os.write(self.fileno(), content) :]
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # of a pipe, and of a terminal
                raise CommandError(f"the output cannot be written: {error.strerror}; redirect it elsewhere") from error


def outlive_readers(background: Background | None = None) -> None:
    """Replace standard output and standard error, and streams that were closed when this process started.

    What the encoding of the terminal lacks is escaped.

    Args:
        background: of a run, which nothing that it prints may hold up or end: it writes what can be written.
    """
    if shutil.get_terminal_size().columns < 20:  # the help that tyro prints for 5 columns does not end
        os.environ["COLUMNS"] = "20"
    for name, mode in ("stdin", "r"), ("stdout", "w"), ("stderr", "w"):
        stream = getattr(sys, name)
        if stream is None:  # /dev/null gets its number, as the lowest that is free, before another file does
            nowhere = open(os.devnull, mode)  # noqa: PTH123, SIM115
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
        elif mode == "w" and stream is getattr(sys, f"__{name}__"):
            output = _Output(stream.fileno(), "w", closefd=False)
            output.call = operator.call if background is None else background.calls.put
            setattr(sys, name, io.TextIOWrapper(output, stream.encoding, "backslashreplace", line_buffering=True))
    if background is not None:
        atexit.register(lambda: background.done().wait())
