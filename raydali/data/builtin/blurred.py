"""The built-in pairs for restoration without data: crops of photographs, blurred and original.

The photographs are the two of `sklearn.datasets.load_sample_images`, 640x427 pixels each, CC BY 2.0: china.jpg by
danielbuechele and flower.jpg by vultilion, both on Flickr.
"""

from pathlib import Path

import numpy as np

from raydali.data.index.cache import built_in_folder
from raydali.extras import require_extra

SIDE = 64
"""Side of a crop, pixels."""
BLURS = (0.6, 0.7, 0.8, 0.9, 1.0)
"""Standard deviations of the Gaussian blurs, pixels."""
_SMALLEST_ERROR = 20.0
_TEST_SHARE = 5


def blurred_folder() -> str:
    """Return the folder of `train/` (180 pairs) and `test/` (45): blurred crops in `img/`, sharp ones in `gt/`, PNG.

    See `built_in_folder`. Crops that blurring hardly changes, such as sky, are left out: nothing can be learnt from
    them, and their high PSNR would hide the PSNR of the others.

    Raises:
        UsageError: the cache cannot be written, or scikit-learn is not installed.
    """
    return built_in_folder("blurred-v1", _write)


def _write(folder: Path) -> None:
    require_extra("demo", "sklearn", "the built-in photographs")
    from PIL import Image, ImageFilter
    from sklearn.datasets import load_sample_images

    photographs = load_sample_images()
    pieces = 0
    for file, pixels in zip(photographs.filenames, photographs.images, strict=True):
        sharp = Image.fromarray(pixels)
        blurred = [sharp.filter(ImageFilter.GaussianBlur(blur)) for blur in BLURS]
        for top in range(0, sharp.height - SIDE + 1, SIDE):
            for left in range(0, sharp.width - SIDE + 1, SIDE):
                box = left, top, left + SIDE, top + SIDE
                target, *inputs = (image.crop(box) for image in (sharp, *blurred))
                least = np.asarray(inputs[0]).astype(float) - np.asarray(target)
                if (least**2).mean() < _SMALLEST_ERROR:
                    continue
                split = "test" if pieces % _TEST_SHARE == _TEST_SHARE // 2 else "train"
                for blur, input in zip(BLURS, inputs, strict=True):
                    for kind, piece in (("img", input), ("gt", target)):
                        scene = folder / split / kind / f"{Path(file).stem}-{blur}"
                        scene.mkdir(parents=True, exist_ok=True)
                        piece.save(scene / f"{top:03}-{left:03}.png")
                pieces += 1
