"""Broken image files of every kind, among sound ones."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from raydali.data.index.labeled import LabeledFiles
from tests.support.pictures import encoded, photograph

SOUND = "sound"


def jpeg(size: tuple[int, int] = (70, 60)) -> bytes:
    return encoded(photograph(size=size))


def bomb(width: int, height: int) -> bytes:
    """A PNG of some hundred bytes that says it is that large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(999))) + chunk(b"IEND", b"")
    )


def filled_up(data: bytes) -> bytes:
    """Its second half zeros, as a download that was broken off leaves it."""
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "cut-short": lambda data: data[: len(data) * 9 // 10],
    "header-only": lambda data: data[:300],
    "filled-up": filled_up,
    "empty": lambda _: b"",
    "two-bytes": lambda data: data[:2],
    "text": lambda _: b"<html><body>404</body></html>" * 9,
    "png-cut-short": lambda data: encoded(Image.open(io.BytesIO(data)), "PNG")[:-900],
    "webp-cut-short": lambda data: encoded(Image.open(io.BytesIO(data)), "WEBP")[:-200],
    "bmp-cut-short": lambda data: encoded(Image.open(io.BytesIO(data)), "BMP")[:-900],
    "bomb": lambda _: bomb(60000, 60000),
}
"""What a file holds instead."""
PLACES: dict[str, Callable[[Path], None]] = {
    "vanished": lambda path: None,
    "folder": Path.mkdir,
    "dangling-link": lambda path: path.symlink_to("/nowhere"),
}
"""What is in a file's place; a folder there may be opened, but not read."""
KINDS = *CONTENTS, *PLACES


def damage(path: Path, kind: str) -> None:
    """Break a sound JPEG."""
    if kind in PLACES:
        path.unlink()
        PLACES[kind](path)
    else:
        path.write_bytes(CONTENTS[kind](path.read_bytes()))


def folder(root: Path, samples: int, broken: dict[int, str], classes: int = 3) -> LabeledFiles:
    """A source of that many JPEGs of several sizes in class folders, of which some are broken since it was indexed."""
    for id in range(samples):
        path = root / f"{id * classes // samples}" / f"{id:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg((50 + id % 40, 60 + id % 30)))
    source = LabeledFiles.scan(str(root))
    for id, kind in broken.items():
        damage(Path(source.path(id)), kind)
    return source
