"""IDX files of small pictures, written byte by byte as the format's page says."""

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.pictures import photograph


def pictures(count: int, height: int = 12, width: int = 10) -> NDArray[np.uint8]:
    """Parts of a photograph, (count, height, width)."""
    grey = np.asarray(photograph().convert("L"))
    return np.stack([grey[7 * i : 7 * i + height, 11 * i : 11 * i + width] for i in range(count)])


def idx(array: NDArray[np.uint8]) -> bytes:
    """An array as the content of an IDX file."""
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(
    folder: Path, split: str, pixels: NDArray[np.uint8], labels: NDArray[np.uint8], *, ending: str = ""
) -> Path:
    """Write the files of images and of labels, and return the former."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        data = idx(array)
        (folder / f"{split}-{kind}-ubyte{ending}").write_bytes(gzip.compress(data) if ending else data)
    return folder / f"{split}-images-idx3-ubyte{ending}"
