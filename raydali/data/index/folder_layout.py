"""Tells what a folder given as --data holds: train/ and val/, files of both, or class folders to be split."""

import logging
from pathlib import Path

from raydali.data.index.files import absolute
from raydali.data.index.listing import entries_or_none, folder_entries
from raydali.data.index.parquet import parquet_folder
from raydali.data.index.tar import holds_shards
from raydali.data.index.validation_set import DEFAULT_FRACTION, Split
from raydali.data.read import storage
from raydali.errors import UsageError
from raydali.text import summarize

TRAINING = "train", "training"
VALIDATION = "val", "validation", "valid", "test", "testing"

_log = logging.getLogger(__name__)


def train_and_val_folders(data: str, asked: Split) -> tuple[str, str] | None:
    """Return the folders or files of the training and of the validation samples; None for class folders to be split.

    Args:
        data: the folder, local or a URI.
        asked: how they are to be split, if that was given.

    Raises:
        UsageError: the folder cannot be listed, or seems to be something else; names the command that would do.
    """
    there, name = _folders(data), data.rstrip("/")
    if {"train", "val"} <= there:
        if asked:
            raise UsageError(
                f"{asked} splits class folders, but {data} has train/ and val/: omit it, or give {name}/train"
            )
        return f"{name}/train", f"{name}/val"
    if not there - {"data"} and (files := split_files(data, asked)):
        return files
    training, validation = (
        sorted((folder for folder in there if folder.lower() in names), key=lambda folder: names.index(folder.lower()))
        for names in (TRAINING, VALIDATION)
    )
    if training:
        other = f"{name}/{validation[0]}" if validation else "FOLDER"
        raise UsageError(
            f"--data {data} has {training[0]}/ but no val/: give --data {name}/{training[0]} --val-data {other}, or "
            f"--val-fraction {DEFAULT_FRACTION} instead of --val-data"
        )
    if validation and there == {*validation}:
        raise UsageError(
            f"--data {data} has no train/, only {summarize(validation)}: give training data, or --val-data"
        )
    if not asked:
        _check_place(data)
    if validation:
        _log.warning("%s: %r is taken for a class: move it away if it holds other samples", data, validation[0])
    return None


def split_files(data: str, asked: Split | None = None) -> tuple[str, str] | None:
    """The Parquet files in a folder for training and validation; None if there are none, or only to be split.

    Raises:
        UsageError: files of one of the two, or of both and a split of them; names the command that would do.
    """
    files = parquet_folder(data)
    training, validation = (next(filter(files.__contains__, names), "") for names in (TRAINING, VALIDATION))
    if training and validation and not asked:
        return files[training], files[validation]
    if not files or (asked and len(files) == 1):
        return None
    one = files.get(training) or next(iter(files.values()))
    raise UsageError(
        f"--data {data} has Parquet files, not one split for each of train and val: give --data '{one}' and "
        f"--val-data, or {asked or Split(DEFAULT_FRACTION)}"
    )


def _check_place(data: str) -> None:
    """Refuse tar shards without a fraction, and X/train for X."""
    if holds_shards(data):
        raise UsageError(
            f"--data {data} has tar shards but no train/: give --val-data too, or --val-fraction {DEFAULT_FRACTION}"
        )
    above, _, name = absolute(data).rpartition("/")
    if name.lower() not in (*TRAINING, *VALIDATION) or above.endswith(":/"):
        return
    beside = {entry.name for entry in entries_or_none(above or "/") if entry.is_folder}
    if {"train", "val"} <= beside:
        raise UsageError(f"--data {data} has no train/: give --data {above}, which has train/ and val/")
    validation = [folder for folder in VALIDATION if folder in beside and folder != name]
    if validation and name.lower() in TRAINING:
        raise UsageError(
            f"--data {data} is beside {validation[0]}/: give --val-data {above}/{validation[0]}, or "
            f"--val-fraction {DEFAULT_FRACTION}"
        )


def _folders(data: str) -> set[str]:
    """The names of the folders in a folder, without hidden ones and what other systems leave behind."""
    root = absolute(data)
    try:
        return {entry.name for entry in folder_entries(root) if entry.is_folder}
    except OSError as error:
        raise UsageError(_unlisted(data, root, error)) from error


def _unlisted(data: str, root: str, error: OSError) -> str:
    if "://" in root:
        return f"{root} cannot be listed: check name, credentials and endpoint: {storage.reason(error)}"
    if isinstance(error, FileNotFoundError):
        here = "" if Path(data).expanduser().is_absolute() else f" in {Path.cwd()}, where the job runs"
        return f"--data {data} does not exist{here}: give {'another' if not here else 'an absolute'} path"
    return f"--data {data} cannot be listed: {storage.not_permitted(error) or error.strerror}; make it readable"
