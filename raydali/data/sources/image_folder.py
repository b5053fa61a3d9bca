"""Class folders of images, indexed once.

The index is that of `torchvision.datasets.ImageFolder`: the same classes, files and order, so that labels and ids
mean the same in both. In addition an unreadable folder is an error, an empty class is a warning, and a link to a
folder above itself is left out. Hidden folders, such as .ipynb_checkpoints, are no classes.
"""

from typing import Self

from raydali.data.sources.labeled import LabeledFiles

# torchvision.datasets.folder.IMG_EXTENSIONS
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder(LabeledFiles):
    """N images in class folders, by id 0..N-1: sorted by class, then folder, then name. Made by `scan`."""

    @classmethod
    def scan(cls, root: str, extensions: tuple[str, ...] = EXTENSIONS, kind: str = "images") -> Self:
        """Index images, see `LabeledFiles.scan`."""
        return super().scan(root, extensions, kind)
