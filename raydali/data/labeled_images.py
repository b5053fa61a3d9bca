"""Labelled images, or videos, as people name them: class folders, or a list of paths and labels."""

from collections.abc import Callable, Sequence

from raydali.data.file_list import FileList, is_list
from raydali.data.image_folder import ImageFolder
from raydali.data.labeled_files import LabeledFiles, check_classes
from raydali.errors import UsageError

Scan = Callable[[str], LabeledFiles]


def labeled_images(
    data: str, root: str | None = None, classes: Sequence[str] | None = None, scan: Scan = ImageFolder.scan
) -> LabeledFiles:
    """The images of class folders, `ImageFolder.scan`, or of a list, `FileList.from_file`.

    Args:
        data: a folder or a list; local, or an `s3://` or `gs://` URI.
        root: where a list's relative paths lie; of no use to a folder.
        classes: those that a list may name; a folder has its own.
        scan: for folders of other files than images.

    Raises:
        UsageError: it cannot be indexed.
    """
    return FileList.from_file(data, root, classes) if is_list(data) else scan(data)


def train_and_val(
    data: str, val_data: str | None = None, root: str | None = None, scan: Scan = ImageFolder.scan
) -> tuple[LabeledFiles, LabeledFiles]:
    """The training and the validation images, of the same classes.

    Args:
        data: a folder that holds `train/` and `val/` of class folders; with `val_data`, the training images alone.
        val_data: the validation images, as `labeled_images` takes them.
        root: where the relative paths of lists lie. Default: beside each list.
        scan: for folders of other files than images.

    Raises:
        UsageError: they cannot be indexed; their classes differ; one list but not two; a root but no list.
    """
    if val_data is None:
        if is_list(data):
            raise UsageError(f"--data {data} lists training images alone: give --val-data too, a list or a folder")
        data, val_data = f"{data.rstrip('/')}/train", f"{data.rstrip('/')}/val"
    check_root(root, data, val_data)
    train = labeled_images(data, root, scan=scan)
    val = labeled_images(val_data, root, train.classes, scan)
    check_classes(train, val)
    return train, val


def check_root(root: str | None, *data: str) -> None:
    """Refuses a root where none of the data is a list.

    Raises:
        UsageError: names both.
    """
    if root is not None and not any(map(is_list, data)):
        raise UsageError(f"--root {root} is of no use to {' and '.join(data)}: only lists have paths below a root")
