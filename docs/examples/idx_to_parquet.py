"""Write the IDX files of MNIST, Fashion-MNIST, KMNIST or EMNIST as Parquet, beside the files as they are downloaded.

Usage: python docs/examples/idx_to_parquet.py FOLDER
"""

import gzip
import io
import sys
from pathlib import Path

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet


def array_in(path: Path) -> np.ndarray:
    """Return the numbers in an IDX file, uint8, in its shape."""
    content = gzip.decompress(path.read_bytes())  # 0, 0, 8, the number of dimensions; the dimensions; the bytes
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)


def png_of(pixels: np.ndarray) -> bytes:
    """Return a grey PNG of pixels, uint8 (height, width)."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for split, name in ("train", "train"), ("test", "t10k"):
        images = array_in(folder / f"{name}-images-idx3-ubyte.gz")  # EMNIST's are transposed: write image.T below
        labels = array_in(folder / f"{name}-labels-idx1-ubyte.gz")
        table = pyarrow.table({"image": [png_of(image) for image in images], "label": labels})
        parquet.write_table(table, folder / f"{split}.parquet", row_group_size=1000)
