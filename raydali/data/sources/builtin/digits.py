"""The built-in data set: scikit-learn's 1,797 handwritten digits as JPEG class folders, for runs without data.

They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine Learning
Repository, 1998), 8x8 grey images that `sklearn.datasets.load_digits` carries.
"""

from pathlib import Path

from raydali.data.sources.builtin.cache import built_in_folder

_VAL_IMAGES = 360


def digits_folder() -> str:
    """The folder that holds `train/` (1,437 images) and `val/` (360), with class folders `0` to `9` in each.

    It lies where `built_in_folder` says. Images are 32x32 grey JPEG.

    Raises:
        UsageError: the cache cannot be written.
    """
    return built_in_folder("digits-v1", _write)


def _write(folder: Path) -> None:
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    pixels = np.round(digits.images * (255 / 16)).astype(np.uint8)
    splits = train_test_split(np.arange(len(pixels)), test_size=_VAL_IMAGES, stratify=digits.target, random_state=0)
    for split, ids in zip(("train", "val"), splits, strict=True):
        for digit in range(10):
            (folder / split / str(digit)).mkdir(parents=True)
        for id in ids:
            image = Image.fromarray(pixels[id]).resize((32, 32), Image.Resampling.BICUBIC)
            image.save(folder / split / str(digits.target[id]) / f"{id:04d}.jpg", quality=95)
