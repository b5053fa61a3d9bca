"""The index of the labelled images in Parquet files: only footers and labels are read, and the index is cached.

Data sets of Hugging Face have a column of structs {bytes, path} and a column of numbers, whose names are in the
schema's metadata. A column of bytes, and one of texts, are as good.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raydali.data.sources import storage
from raydali.data.sources.files import digest
from raydali.data.sources.listing import FoundFile
from raydali.data.sources.shard_index import Label, Member, Part, ShardIndex, shard_index
from raydali.data.sources.storage import why_pointer
from raydali.errors import UsageError
from raydali.text import plural, summarize

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, DataType, Schema
    from pyarrow.parquet import FileMetaData, ParquetFile

ROW_BITS = 32
"""Bits of the row in an image's position; the row group is above them."""
_LONGEST = (1 << 31) - 1  # bytes of a column that Arrow decodes at once


class Columns(NamedTuple):
    """The columns of images and labels, and the names of the labels 0, 1, ... if the files have them."""

    image: str
    label: str | None
    names: tuple[str, ...] = ()


def parquet_index(root: str, files: Sequence[FoundFile], image: str, label: str | None) -> ShardIndex:
    """Index the rows of these files, see `shard_index`. The name of a row is its number in its file, from 0.

    An offset is the row group of an image in its file, above `ROW_BITS`, and its row in there. A length is the mean of
    the images of the row group. If the files name their labels, the names are in the files' order.

    Args:
        root: absolute, or an `s3://` or `gs://` URI.
        files: below it.
        image: the column of the images.
        label: the column of the labels; None: all are 0.

    Raises:
        UsageError: files that are cut off or no Parquet files, that lack a column, have another type in it or other
            names; rows without a label; no rows. Names the first of them.
    """
    first = f"{root}/{files[0].name}"
    try:
        with _opened(first) as file:
            columns = _columns(file.schema_arrow, image, label)
    except (OSError, ValueError) as error:
        reason = storage.reason(error) if isinstance(error, OSError) else error
        raise UsageError(f"{first} cannot be indexed: {reason}") from error
    of_columns = digest(*map(os.fsencode, (image, label or "", *columns.names)))
    index = shard_index(root, files, partial(_part, columns), kind=f"parquet/{of_columns}", needed="rows")
    if not columns.names:
        return index
    numbers = np.array(os.fsdecode(index.label_names.tobytes()).split("\0"), np.int64)
    names = np.frombuffer(os.fsencode("\0".join(columns.names)), np.uint8)
    return replace(index, labels=numbers[index.labels], label_names=names, numbered=np.array(False))


def image_leaf(footer: "FileMetaData", column: str) -> int:
    """Return the index of the leaf column with the bytes of images: of the column itself, or of its field `bytes`."""
    leaves = (column, f"{column}.bytes")
    return next(leaf for leaf in range(footer.num_columns) if footer.schema.column(leaf).path in leaves)


@contextmanager
def _opened(path: str) -> Iterator["ParquetFile"]:
    """Open a file to read its footer and its labels. Raises ValueError if it is no Parquet file."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    local = "://" not in path
    with pyarrow.OSFile(path) if local else storage.file_system(path).open_input_file(path.partition("://")[2]) as file:
        try:
            opened = ParquetFile(file, pre_buffer=not local)
        except pyarrow.ArrowInvalid as error:
            why = why_pointer(file.read_at(64, 0)) or "no Parquet file, or cut off: write it again"
            raise ValueError(why) from error
        yield opened


def _part(columns: Columns, path: str, _size: int) -> Part:
    """Index the rows of a file. Raises ValueError for a broken one."""
    with _opened(path) as file:
        own = _columns(file.schema_arrow, columns.image, columns.label)
        if own != columns:
            raise ValueError(f"its labels have other names than those of the first file: {summarize(own.names)}")
        images = [*_images(file.metadata, columns.image)]
        labels: list[Label] = [0] * len(images)
        if columns.label is not None:
            labels = _labels(file.read([columns.label]).column(0), columns.names)
    return Part(images, labels)


def _images(footer: "FileMetaData", column: str) -> Iterator[Member]:
    leaf, row, without = image_leaf(footer, column), 0, 0
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        rows, chunk = group.num_rows, group.column(leaf)
        if chunk.total_uncompressed_size > _LONGEST:
            size = f"{chunk.total_uncompressed_size / 1e9:.1f} GB"
            raise ValueError(f"row group {number} has {size} of images, at most 2 GB can be read: write smaller ones")
        without += (chunk.statistics.null_count or 0) if chunk.is_stats_set else 0
        for within in range(rows):
            yield Member(b"%d" % (row + within), number << ROW_BITS | within, -(-chunk.total_uncompressed_size // rows))
        row += rows
    if row and without == row:
        raise ValueError(f"column {column!r} has no bytes, in {plural(row, 'row')}: write the images into it")


def _labels(column: "ChunkedArray", names: tuple[str, ...]) -> list[Label]:
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    labels: list[Any] = column.to_pylist()
    wrong = [row for row, label in enumerate(labels) if label is None or (names and not 0 <= label < len(names))]
    if wrong:
        counted, first = plural(len(wrong), "row"), wrong[0]
        of = f" of {plural(len(names), 'class')}" if names else ""
        raise ValueError(f"{counted} without a label{of}, first row {first} with {labels[first]}: remove them")
    return labels


def _columns(schema: "Schema", image: str, label: str | None) -> Columns:
    """The columns of images and labels. Raises ValueError if one is missing or has another type."""
    for option, name in (("image", image), ("label", label)):
        if name is not None and name not in schema.names:
            there = summarize(schema.names, 8, show=repr)
            raise ValueError(f"no column {name!r}, its columns are {there}: give --{option}-column")
    for option, name, fits, wanted in (
        ("image", image, _holds_images, "bytes"),
        ("label", label, _holds_labels, "whole numbers or texts"),
    ):
        if name is not None and not fits(schema.field(name).type):
            raise ValueError(f"column {name!r} has {schema.field(name).type}, not {wanted}: give --{option}-column")
    if label is None:
        return Columns(image, None)
    features = _features(schema.metadata or {})
    names = features.get(label, {}).get("names") if isinstance(features.get(label), dict) else None
    return Columns(image, label, tuple(map(str, names or ())))


def _features(metadata: dict[bytes, bytes]) -> dict[str, Any]:
    """Return the features that Hugging Face's `datasets` writes about the columns; empty for other files."""
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return features if isinstance(features, dict) else {}


def _holds_images(of: "DataType") -> bool:
    from pyarrow import types

    if types.is_struct(of):
        return any(field.name == "bytes" and _holds_images(field.type) for field in of)
    return bool(types.is_binary(of) or types.is_large_binary(of))


def _holds_labels(of: "DataType") -> bool:
    from pyarrow import types

    of = of.value_type if types.is_dictionary(of) else of
    return bool(types.is_integer(of) or types.is_string(of) or types.is_large_string(of))
