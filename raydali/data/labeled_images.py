"""Labelled images as people name them: class folders, or a list of paths and labels."""

from collections.abc import Sequence

from raydali.data.file_list import FileList, is_list
from raydali.data.image_folder import ImageFolder
from raydali.data.labeled_files import LabeledFiles, check_classes
from raydali.errors import UsageError


def labeled_images(data: str, root: str | None = None, classes: Sequence[str] | None = None) -> LabeledFiles:
    """The images of class folders, `ImageFolder.scan`, or of a list, `FileList.from_file`.

    Args:
        data: a folder or a list; local, or an `s3://` or `gs://` URI.
        root: where a list's relative paths lie; of no use to a folder.
        classes: those that a list may name; a folder has its own.

    Raises:
        UsageError: it cannot be indexed.
    """
    return FileList.from_file(data, root, classes) if is_list(data) else ImageFolder.scan(data)


def train_and_val(data: str, val_data: str | None = None, root: str | None = None) -> tuple[LabeledFiles, LabeledFiles]:
    """The training and the validation images, of the same classes.

    Args:
        data: a folder that holds `train/` and `val/` of class folders; with `val_data`, the training images alone.
        val_data: the validation images, as `labeled_images` takes them.
        root: where the relative paths of lists lie. Default: beside each list.

    Raises:
        UsageError: they cannot be indexed; their classes differ; one list but not two; a root but no list.
    """
    if val_data is None:
        if is_list(data):
            raise UsageError(f"--data {data} lists training images alone: give --val-data too, a list or a folder")
        data, val_data = f"{data.rstrip('/')}/train", f"{data.rstrip('/')}/val"
    if root is not None and not (is_list(data) or is_list(val_data)):
        raise UsageError(f"--root {root} is of no use to {data} and {val_data}: only lists have paths below a root")
    train = labeled_images(data, root)
    val = labeled_images(val_data, root, train.classes)
    check_classes(train, val)
    return train, val
