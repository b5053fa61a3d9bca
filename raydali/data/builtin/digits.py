"""The built-in data set: 1,797 handwritten digits as JPEG class folders, for runs without data.

They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine Learning
Repository, 1998, CC BY 4.0). `digits.npz` holds them as `sklearn.datasets.load_digits` does: images, 8x8 with values
from 0 to 16, and labels; is_val marks the 360 for validation, a stratified split.
"""

from pathlib import Path

import numpy as np

from raydali.data.index.cache import built_in_folder


def digits_folder() -> str:
    """Return the folder of `train/` (1,437 images) and `val/` (360), with class folders `0` to `9` in each.

    See `built_in_folder`. Images are 32x32 grey JPEG.

    Raises:
        UsageError: the cache cannot be written.
    """
    return built_in_folder("digits-v1", _write)


def _write(folder: Path) -> None:
    from PIL import Image

    with np.load(Path(__file__).with_name("digits.npz")) as digits:
        images, labels, is_val = digits["images"], digits["labels"], digits["is_val"]
    pixels = np.round(images * (255 / 16)).astype(np.uint8)
    for split in ("train", "val"):
        for digit in range(10):
            (folder / split / str(digit)).mkdir(parents=True)
    for id, (label, val) in enumerate(zip(labels, is_val, strict=True)):
        image = Image.fromarray(pixels[id]).resize((32, 32), Image.Resampling.BICUBIC)
        image.save(folder / ("val" if val else "train") / str(label) / f"{id:04d}.jpg", quality=95)
