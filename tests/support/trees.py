"""Trees of files with nasty names, and what is read of them."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types

from raydali.data.index.labeled import LabeledSource
from raydali.data.read.contents import Content, Failed

NASTY = [
    "cat/1.jpg",
    "cat/10.jpg",
    "cat/2.jpg",
    "cat/.hidden.jpg",
    "cat/.jpg",
    "cat/upper.JPEG",
    "cat/Mixed.JpG",
    "cat/notes.txt",
    "cat/no_extension",
    "cat/jpg",
    "cat/a-b/1.png",
    "cat/a/b/1.png",
    "cat/a/z.webp",
    "cat/a b/with space.bmp",
    "cat/a.jpg/inside.tif",
    "cat/\u00fcml\u00e4ut/\u65e5\u672c.ppm",
    "cat/\U0001f408.pgm",
    "cat/back\\slash%20.tiff",
    "cat-dog/1.jpg",
    "cat/dog/1.jpg",
    "Zebra/1.jpg",
    ".hidden/1.jpg",
    "\u00e9l\u00e9phant/1.jpg",
    "top-level.jpg",
]


def grow(root: Path, files: list[str]) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"content of " + os.fsencode(file))
    return root


def samples(index: LabeledSource) -> list[tuple[str, int]]:
    return [(index.path(id), label) for id, label in enumerate(index.labels.tolist())]


def read_by_dali(paths: list[NDArray[np.uint8]] | NDArray[np.uint8]) -> list[bytes]:
    graph = Pipeline(batch_size=len(paths), num_threads=2, device_id=None, prefetch_queue_depth=1)
    with graph:
        graph.set_outputs(fn.io.file.read(fn.external_source(lambda: paths, dtype=types.UINT8, ndim=1)))
    graph.build()
    return [np.array(content).tobytes() for content in graph.run()[0]]


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    root = grow(tmp_path / "nasty", NASTY)
    grow(tmp_path / "elsewhere", ["1.jpg", "deep/2.jpg"])
    (root / "cat" / "link").symlink_to(tmp_path / "elsewhere")
    (root / "linked-class").symlink_to(tmp_path / "elsewhere")
    (root / "cat" / "dangling.jpg").symlink_to("nowhere")
    (root / "cat" / "itself.jpg").symlink_to("itself.jpg")
    (root / "cat" / os.fsdecode(b"\xff\xfe.jpg")).write_bytes(b"undecodable")
    return root


def bytes_of(contents: Iterable[Content | memoryview | OSError]) -> list[bytes]:
    """Return contents that could all be read."""
    failed = [content for content in contents if isinstance(content, Failed | OSError)]
    assert not failed
    return [bytes(content) for content in contents]  # type: ignore[arg-type]
