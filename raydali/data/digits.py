"""The built-in data set: scikit-learn's 1,797 handwritten digits as JPEG class folders, for runs without data.

They are the test part of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak, UCI Machine Learning
Repository, 1998), 8x8 grey images that `sklearn.datasets.load_digits` carries.
"""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

from raydali.errors import UsageError

_VAL_IMAGES = 360


def digits_folder() -> str:
    """The folder that holds `train/` (1,437 images) and `val/` (360), with class folders `0` to `9` in each.

    It lies below `$XDG_CACHE_HOME`, or `~/.cache`, and is written by the first call. Images are 32x32 grey JPEG.
    Several processes may call at once: each writes a copy beside it, and the first to rename its own wins.

    Raises:
        UsageError: the cache cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "raydali"
    folder = cache / "digits-v1"
    if folder.is_dir():
        return str(folder)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="digits-v1.", dir=cache) as temporary:
            _write(Path(temporary, "digits"))
            try:
                os.rename(Path(temporary, "digits"), folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise UsageError(
            f"cannot write the built-in digits to {folder}: {error.strerror}; "
            f"set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return str(folder)


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
