"""`raydali verify`: find the samples that cannot be read, before a run.

    raydali verify ~/imagenet -o broken.txt
    python jobs/imagenet.py --data ~/imagenet --exclude broken.txt

Each file is read and decoded completely by Pillow or FFmpeg, in as many processes as there are cores. A run uses the
same criterion for broken samples (data/loading/quarantine.py).
"""

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.errors import DataError, UsageError
from raydali.host.process_pool import in_processes, process_count
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import plural, summarize

if TYPE_CHECKING:
    from PIL import Image

    from raydali.data.loading.quarantine import BrokenSample
    from raydali.data.sources.coco import Coco
    from raydali.data.sources.image_pairs import ImagePairs
    from raydali.data.sources.labeled import LabeledFiles, LabeledSource
    from raydali.data.sources.source import Source

SHOWN = 50
FRAMES_AT_ONCE = 256
Kind = Literal["images", "pairs", "boxes", "videos"]
Load = Callable[[Any, int], bool]
"""A function that reads a whole sample, and returns whether it has transparent pixels."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Find the samples that cannot be read: missing, empty, truncated, not an image, too large.

    Exit code 1: there are some.
    """

    data: tyro.conf.Positional[str]
    """Folder or URI with train/ and val/, or class folders, tar shards, TFRecord or Parquet files, or a list with a
    line path,label per image; of pairs with train/ and test/, or img/ and gt/ themselves; of boxes in COCO's layout."""
    kind: Kind = "images"
    """Kind of samples: images or videos with labels, pairs of images, images with boxes."""
    split: Literal["train", "val", "test", "all"] = "all"
    """Split to verify; val is test for pairs."""
    root: str | None = None
    """Folder or URI that relative paths in a list start from. Default: the list's folder."""
    label_column: str | None = None
    """Column of a list with the labels, by its name in the header, or by its number from 1 after the path; or of
    Parquet files. Default there: label."""
    image_column: str | None = None
    """Column of Parquet files with the images. Default: image."""
    multi_label: bool = False
    """Each column of a list is a label of its own, 0 or 1."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """File for broken samples, one path and reason per line, as --exclude of a job expects it."""
    workers: int | None = None
    """Number of processes. Default: one per core."""
    json: JsonFile = None


@dataclass
class Found:
    """Findings about some samples.

    Attributes:
        broken: samples that cannot be read, by id.
        transparent: number of other samples with transparent pixels.
    """

    broken: list["BrokenSample"]
    transparent: int = 0

    def add(self, more: "Found") -> int:
        """Add the findings about other samples; return the number of broken ones so far."""
        self.broken += more.broken
        self.transparent += more.transparent
        return len(self.broken)


def main(options: Verify) -> None:
    """Index the data, read all samples, print and write the broken ones.

    Raises:
        UsageError: an option is invalid, or the data cannot be indexed.
        DataError: samples are broken (they were printed and written), or the storage does not answer.
    """
    from raydali.data.sources.exclusion import as_line
    from raydali.data.sources.skipped_files import describe_skipped

    workers = process_count(options.workers)
    require_writable("--output", options.output)
    require_writable("--json", options.json)
    samples, found, skipped = 0, Found([]), Counter[str]()
    for source in _sources(options):
        samples += len(source)
        skipped.update(getattr(source, "skipped", {}))
        of_source = Found([])
        in_processes(partial(_examined, _LOADS[options.kind], source), len(source), workers, str(source), of_source.add)
        found.add(of_source)
    broken = found.broken
    show(broken)
    if options.output is not None:
        head = " ".join(f"# raydali verify {options.data}".splitlines())
        text = f"{head}\n" + "".join(as_line(sample.path, sample.reason) for sample in broken)
        Path(options.output).expanduser().write_bytes(text.encode("utf-8", "surrogateescape"))
    if options.json is not None:
        rows = [{name: asdict(sample)[name] for name in ("id", "path", "reason")} for sample in broken]
        counts = {"samples": samples, "transparent": found.transparent, "skipped": skipped}
        write_json({"data": options.data} | counts | {"broken": rows}, options.json)
    also = f"; {describe_skipped(skipped)}" if skipped else ""
    if found.transparent:
        also += f"; {found.transparent} with transparent pixels, whose alpha is ignored"
    if broken:
        remedy = f"a job leaves them out with --exclude {options.output}" if options.output else "-o FILE lists them"
        raise DataError(f"found {plural(len(broken), 'broken sample')} among {samples}: {remedy}{also}")
    print(f"{plural(samples, 'sample')}, none broken{also}")


def _sources(options: Verify) -> list[Any]:
    from raydali.data.sources.coco_folder import one_split
    from raydali.data.sources.files import absolute
    from raydali.data.sources.folder_layout import split_files
    from raydali.data.sources.formats import check_column_options, labeled_images, source_kind
    from raydali.data.sources.idx import idx_folder
    from raydali.data.sources.image_pairs import ImagePairs
    from raydali.data.sources.parquet import parquet_folder
    from raydali.data.sources.storage import is_folder
    from raydali.data.sources.video.clips import scan_videos

    data = options.data.rstrip("/") or "/"
    splits = ("train", "test") if options.kind == "pairs" else ("train", "val")
    wanted = [split for split in splits if options.split in (split, "all")]
    if not wanted:
        raise UsageError(f"--split must be {' or '.join(splits)} with --kind {options.kind}, not {options.split}")
    names = "label_column", "image_column", "multi_label"
    columns: dict[str, Any] = {name: getattr(options, name) for name in names}
    check_column_options(data, root=options.root, **columns)
    if options.kind == "boxes":
        return [one_split(absolute(data), split) for split in wanted]
    there = all(is_folder(absolute(os.path.join(data, split))) for split in splits)  # noqa: PTH118 (or a URI)
    files = None
    if options.kind == "images" and not there and source_kind(data) == "folder":
        files = split_files(data, None) if len(parquet_folder(data) or idx_folder(data)) > 1 else None
    if options.split != "all" and not there and not files:
        raise UsageError(f"--split {options.split}: {options.data} lacks {' or '.join(splits)}: leave it out")
    roots = [os.path.join(data, split) for split in wanted] if there else [data]  # noqa: PTH118
    if files:
        roots = [file for split, file in zip(splits, files, strict=True) if split in wanted]
    if options.kind == "pairs":
        return [ImagePairs.scan(root) for root in roots]
    scan = scan_videos if options.kind == "videos" else None
    return [labeled_images(root, options.root, scan=scan, **columns) for root in roots]


def show(broken: Sequence["BrokenSample"]) -> None:
    """Print the first broken samples, and the number of the others."""
    if broken:
        print(summarize(broken, SHOWN, separator="\n").encode("utf-8", "backslashreplace").decode())  # any bytes


def _examined(load: Load, source: "Source", ids: Iterable[int]) -> Found:
    from raydali.data.loading.quarantine import BrokenSample
    from raydali.data.loading.read_errors import why_broken

    found = Found([])

    def examine(id: int) -> None:
        found.transparent += load(source, id)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about palettes with transparency and large images
        for id in ids:
            reason = why_broken(partial(examine, id))
            if reason is not None:
                path = source.path(id)
                for prefix in (f"{path} cannot be read: ", f"{path}: "):
                    reason = reason.removeprefix(prefix)
                found.broken.append(BrokenSample(id, path, reason))
    return found


def _load_image(source: "LabeledSource", id: int) -> bool:
    return _decoded(source.read(id))[1]


def _load_pair(source: "ImagePairs", id: int) -> bool:
    sizes, transparent = set(), False
    for files in (source.inputs, source.targets):
        try:
            image, has_alpha = _decoded(files.read(id))
        except Exception as error:
            raise DataError(f"{files.path(id)}: {error}") from error
        sizes.add(f"{image.width}x{image.height}")
        transparent |= has_alpha
    if len(sizes) > 1:
        raise DataError(f"{' and '.join(sorted(sizes))} pixels: both images of a pair must have the same size")
    return transparent


def _load_boxes(source: "Coco", id: int) -> bool:
    image, transparent = _decoded(source.read(id))
    height, width = source.sizes[id].tolist()
    if height and width and image.size != (width, height):
        raise DataError(f"{image.width}x{image.height} pixels, but {width}x{height} in the annotations")
    return transparent


def _load_video(source: "LabeledFiles", id: int) -> bool:
    from raydali.data.sources.video.packets import read_clip_packets, read_video_info
    from raydali.data.tasks.video_pyav import decoded

    path = source.path(id)
    facts = read_video_info(path)
    for first in range(0, facts.frames, FRAMES_AT_ONCE):
        with read_clip_packets(path, facts, first, 1, min(FRAMES_AT_ONCE, facts.frames - first)) as part:
            decoded(part, lambda _: None)
    return False


def _decoded(data: bytes) -> tuple["Image.Image", bool]:
    """Decode an image; return it, and whether it has transparent pixels."""
    import numpy as np

    from raydali.data.tasks.pillow import decoded, opened

    image, as_stored = decoded(data), opened(data)
    if not as_stored.has_transparency_data:
        return image, False
    if as_stored.mode.startswith("I"):  # Pillow cannot convert these; one grey value is transparent
        return image, True
    return image, bool(np.asarray(as_stored.convert("RGBA").getchannel("A")).min() < 255)


_LOADS: dict[str, Load] = {
    "images": _load_image,
    "pairs": _load_pair,
    "boxes": _load_boxes,
    "videos": _load_video,
}
