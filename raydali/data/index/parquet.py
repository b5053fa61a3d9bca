"""Labelled images in Parquet: only footers and labels are read for the index, and row_groups.py reads the images.

Data sets of Hugging Face have a column of structs {bytes, path} and a column of numbers, whose names are in the
schema's metadata. A column of bytes, and one of texts, are as good.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.files import digest
from raydali.data.index.listing import entries_or_none, find_files
from raydali.data.index.shard_index import Label, Member, Part, shard_index
from raydali.data.index.shards import Shards
from raydali.data.read import storage
from raydali.data.read.contents import Contents, read
from raydali.data.read.file_parts import read_part
from raydali.data.read.row_groups import KEPT_BYTES, RowPart, image_leaf, open_parquet
from raydali.data.read.storage import ObjectPart
from raydali.data.stream.read_together import ReadTogether
from raydali.errors import UsageError
from raydali.text import plural, summarize

if TYPE_CHECKING:
    from pyarrow import ChunkedArray, DataType, Schema
    from pyarrow.parquet import FileMetaData, ParquetFile

IMAGE, LABEL = "image", "label"
"""The columns of most data sets."""
_ENDING = ".parquet"
_SPLIT = re.compile(r"([a-z]\w*)(-.*)?\.parquet$|")
ROW_BITS = 32
"""Bits of the row in an image's position; the row group is above them."""
_LONGEST = (1 << 31) - 1  # bytes of a column that Arrow decodes at once


@dataclass(frozen=True, eq=False)
class Parquet(Shards):
    """N images in S Parquet files, by id 0..N-1; the name of one is the number of its row, from 0. Made by `scan`.

    Images of a row group have neighbouring ids. If labels are read, row groups as large as most come first.

    Attributes:
        offsets: int64 (N,), the row group of an image in its file, above `ROW_BITS`, and its row in there.
        lengths: int64 (N,), the mean of the images of the row group, in bytes.
        column: the column of the images.
    """

    column: str = IMAGE
    in_ranges = False

    @classmethod
    def scan(
        cls,
        data: str,
        classes: Sequence[str] | None = None,
        *,
        image_column: str | None = None,
        label_column: str | None = None,
        labeled: bool = True,
    ) -> Self:
        """Index the images of some files, see `Shards.of_index`; only footers and labels are read.

        If Hugging Face's metadata name the labels, classes are these names, in their order.

        Args:
            data: a file or a pattern such as `train-*.parquet` or `data/{train,extra}-*.parquet`, where * matches only
                names of files; local (`~` is expanded), or an `s3://` or `gs://` URI.
            classes: the allowed labels in order, for validation the labels of the training set. Default: any.
            image_column: with images as bytes, or structs of Hugging Face. Default: image.
            label_column: with numbers or texts. Default: label.
            labeled: False: labels are not read, and all images have the class '0'.

        Raises:
            UsageError: files that are missing, cut off or no Parquet files, that lack a column, have another type in it
                or other names; rows without a label; no rows. Names the first of them. A label is not among the
                classes.
        """
        root, files = find_files(data)
        first = f"{root}/{files[0].name}"
        try:
            schema = _opened(first, files[0].size).schema_arrow
            columns = _columns(schema, image_column or IMAGE, (label_column or LABEL) if labeled else None)
        except (OSError, ValueError) as error:
            reason = storage.reason(error) if isinstance(error, OSError) else error
            raise UsageError(f"{first} cannot be indexed: {reason}") from error
        of_columns = digest(*map(os.fsencode, (columns.image, columns.label or "", *columns.names)))
        index = shard_index(root, files, partial(_part, columns), kind=f"parquet/{of_columns}", needed="rows")
        if columns.names:
            index = index.with_labels(np.array(index.names_of_labels, np.int64)[index.labels], columns.names)
        source = cls.of_index(data, root, files, index, classes, column=columns.image)
        return source._with_whole_groups_first() if labeled else source

    def drop(self, ids: Iterable[int]) -> Self:
        """The index without these samples; the ids of others change."""
        return super().drop(ids)._with_whole_groups_first()

    def _with_whole_groups_first(self) -> Self:
        """The index in an order in which blocks of ids, as large as most row groups, are row groups."""
        sizes = np.bincount(self.read_together.groups)
        samples = np.bincount(sizes) * np.arange(sizes.max() + 1)
        is_whole = (sizes == samples.argmax())[self.read_together.groups]
        if not (np.diff(is_whole.view(np.int8)) > 0).any():
            return self
        whole, rest = (super(Parquet, self).drop(np.flatnonzero(part)) for part in (~is_whole, is_whole))
        arrays: dict[str, Any] = {
            "name_offsets": np.append(whole.name_offsets, rest.name_offsets[1:] + whole.name_offsets[-1])
        }
        for name in ("shard_numbers", "offsets", "lengths", "labels", "packed_names"):
            arrays[name] = np.append(getattr(whole, name), getattr(rest, name))
        return replace(whole, **arrays)

    def contents(self, ids: NDArray[np.int64]) -> Contents:
        """The contents of these images, each uint8, or why it cannot be read; each row group is read once."""
        by_group = np.argsort(ids)
        places = zip(self.parts(ids[by_group]), self.offsets[ids[by_group]].tolist(), strict=True)
        contents = read([RowPart(file, self.column, *divmod(at, 1 << ROW_BITS)) for file, at in places])
        return Contents(contents[place] for place in np.argsort(by_group).tolist())

    @cached_property
    def read_together(self) -> ReadTogether:
        """The row groups, of which a process keeps `KEPT_BYTES`."""
        files, groups = self.shard_numbers.astype(np.int64) << ROW_BITS, self.offsets >> ROW_BITS
        keys, first, groups = np.unique(files | groups, return_index=True, return_inverse=True)
        # Rows from 0 to the last one: those before it may have been dropped.
        rows = np.zeros(len(keys), np.int64)
        np.maximum.at(rows, groups, (self.offsets & ((1 << ROW_BITS) - 1)) + 1)
        return ReadTogether(groups, self.lengths[first] * rows, self.lengths, KEPT_BYTES)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what `Shards` hash and of the images' column, 32 hex digits."""
        return digest(super().fingerprint.encode(), os.fsencode(self.column))


def names_parquet(data: str) -> bool:
    """Return whether this is the name or the pattern of Parquet files, and not an existing folder."""
    return data.lower().endswith(_ENDING) and not os.path.isdir(os.path.expanduser(data))


def parquet_folder(folder: str) -> dict[str, str]:
    """Find the Parquet files in a folder, or in its folder `data/`, as in a data set cloned from Hugging Face.

    Args:
        folder: local, or an `s3://` or `gs://` URI.

    Returns:
        The file or the pattern of files of each split, by the word that their names begin with, such as `train` of
        `train-00000-of-00002.parquet`; if they have none, of all files, by "".
    """
    name = folder.rstrip("/")
    for place in (name, f"{name}/data"):
        names = [file.name for file in entries_or_none(place) if not file.is_folder]
        matches = map(_SPLIT.match, sorted(filter(names_parquet, names)))
        words = {match[1] or "": match[2] for match in matches if match}
        if "" in words:
            return {"": f"{place}/*{_ENDING}"}
        if words:
            return {word: f"{place}/{word}{'-*' * bool(rest)}{_ENDING}" for word, rest in words.items()}
    return {}


# ----------------------------------------------------------------------------------------------------------------------
# The index


class Columns(NamedTuple):
    """The columns of images and labels, and the names of the labels 0, 1, ... if the files have them."""

    image: str
    label: str | None
    names: tuple[str, ...] = ()


def _opened(path: str, size: int) -> "ParquetFile":
    """Open a file to read its footer and its labels. Raises ValueError if it is no Parquet file."""
    import pyarrow

    try:
        return open_parquet(ObjectPart(path, size=size))
    except pyarrow.ArrowInvalid as error:
        head = read_part(ObjectPart(path, 0, min(64, size), size))
        raise ValueError(storage.why_pointer(head) or "no Parquet file, or cut off: write it again") from error


def _part(columns: Columns, path: str, size: int) -> Part:
    """Index the rows of a file. Raises ValueError for a broken one."""
    file = _opened(path, size)
    own = _columns(file.schema_arrow, columns.image, columns.label)
    if own != columns:
        raise ValueError(f"its labels have other names than the labels of the first file: {summarize(own.names)}")
    images = [*_images(file.metadata, columns.image)]
    labels: list[Label] = [0] * len(images)
    if columns.label is not None:
        labels = _labels(file.read([columns.label]).column(0), columns.names)
    return Part.of(images, labels)


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
