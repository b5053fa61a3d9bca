"""Parquet files made on the spot, as Hugging Face's `datasets` write them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from raydali.data.index.labeled import LabeledSource

STRUCT = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def features(names: Sequence[str], column: str = "label") -> dict[bytes, bytes]:
    """The schema's metadata with the names of labels."""
    labels = {"names": [*names], "_type": "ClassLabel"}
    return {b"huggingface": json.dumps({"info": {"features": {"image": {"_type": "Image"}, column: labels}}}).encode()}


def write_parquet(
    path: Path,
    images: Sequence[bytes | None],
    labels: Sequence[Any],
    *,
    names: Sequence[str] = (),
    rows: int = 100,
    columns: tuple[str, str] = ("image", "label"),
    plain: bool = False,
    **options: Any,
) -> Path:
    """Write images with row groups of so many rows, as structs or as plain bytes."""
    structs = [{"bytes": image, "path": f"{i}.jpg"} for i, image in enumerate(images)]
    column = pyarrow.array(images, pyarrow.binary()) if plain else pyarrow.array(structs, STRUCT)
    metadata = features(names, columns[1]) if names else None
    table = pyarrow.table(dict(zip(columns, (column, pyarrow.array(labels)), strict=True)), metadata=metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=rows, **options)
    return path


def packed_in_parquet(folder: Path, source: LabeledSource, files: int = 3, split: str = "train", rows: int = 5) -> str:
    """Write the images of a source by the same ids; return the pattern of the files."""
    for number in range(files):
        ids = range(number * len(source) // files, (number + 1) * len(source) // files)
        path = folder / f"{split}-{number:05}-of-{files:05}.parquet"
        labels = [int(source.labels[id]) for id in ids]
        write_parquet(path, [source.read(id) for id in ids], labels, names=source.classes, rows=rows)
    return f"{folder}/{split}-*.parquet"
