"""Labelled images in Parquet: parquet_index.py finds rows and labels, row_groups.py reads them."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.files import absolute, digest
from raydali.data.sources.listing import folder_entries
from raydali.data.sources.parquet_index import ROW_BITS, parquet_index
from raydali.data.sources.row_groups import KEPT_BYTES, read_image
from raydali.data.sources.shards import Shards
from raydali.data.stream.read_together import ReadTogether
from raydali.errors import UsageError

IMAGE, LABEL = "image", "label"
"""The columns of most data sets."""
_ENDING = ".parquet"
_SPLIT = re.compile(r"([a-z]\w*)(-.*)?\.parquet$|")


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

    mark: ClassVar[str] = "#"

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
        """Index the images of some files, of which only footers and labels are read.

        Classes are the names that Hugging Face's metadata give the labels, in their order; else the labels that occur,
        sorted. Warns if numeric labels without names are not contiguous from 0.

        Args:
            data: a file or a pattern such as `train-*.parquet` or `data/{train,extra}-*.parquet`, where * matches only
                names of files; local (`~` is expanded), or an `s3://` or `gs://` URI.
            classes: the allowed labels in order, for validation those of the training set. Default: any.
            image_column: with images as bytes, or structs of Hugging Face. Default: image.
            label_column: with numbers or texts. Default: label.
            labeled: False: labels are not read, and all images have the class '0'.

        Raises:
            UsageError: files are missing, cannot be read or hold no rows; see `parquet_index`. A label is not among
                the classes.
        """
        image = image_column or IMAGE
        index = partial(parquet_index, image=image, label=(label_column or LABEL) if labeled else None)
        found = replace(cls._scan(data, data, classes, index), column=image)
        return found._with_whole_groups_first() if labeled else found

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

    def files(self, ids: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """The contents of these images, uint8 each, read-only; each row group is read once.

        Raises:
            StoreError: an image cannot be read, or the size of its file has changed; names it.
            OSError: a row group is damaged.
        """
        by_group = np.argsort(ids)
        contents = super().files(ids[by_group])
        return [contents[place] for place in np.argsort(by_group).tolist()]

    def _content(self, id: int) -> bytes:
        group, row = divmod(int(self.offsets[id]), 1 << ROW_BITS)
        return read_image(self._shard(id), self._size(id), self.column, group, row)

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
        try:
            names = [file.name for file in folder_entries(absolute(place)) if file is not None]
        except (OSError, UsageError):  # reading it will raise the error
            continue
        found = map(_SPLIT.match, sorted(filter(names_parquet, names)))
        words = {match[1] or "": match[2] for match in found if match}
        if "" in words:
            return {"": f"{place}/*{_ENDING}"}
        if words:
            return {word: f"{place}/{word}{'-*' * bool(rest)}{_ENDING}" for word, rest in words.items()}
    return {}
