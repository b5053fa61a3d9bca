"""`raydali verify`: find the samples that cannot be read, before a run.

    raydali verify ~/imagenet -o broken.txt
    python jobs/imagenet.py --data ~/imagenet --exclude broken.txt

Each file is read and decoded completely by DALI and Pillow (examine.py), or by FFmpeg, in as many processes as
there are cores. These may die of a file, which is named. A run uses the same criterion for broken samples
(data/broken/quarantine.py).
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.errors import DataError, UsageError
from raydali.host.all_samples import in_processes, process_count
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import plural, printable, summarize

if TYPE_CHECKING:
    from raydali.data.broken.quarantine import BrokenSample

SHOWN, SHOWN_WARNINGS = 50, 10
Kind = Literal["images", "pairs", "masks", "boxes", "videos"]


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Find the samples that cannot be read: missing, empty, truncated, not an image, too large.

    Exit code 1: there are some.
    """

    data: tyro.conf.Positional[str]
    """Folder or URI with train/ and val/, or class folders, tar shards, TFRecord or Parquet files, or a list with a
    line path,label per image; of pairs with train/ and test/, or img/ and gt/ themselves; of masks as for the
    segmentation job, or a list with a line image,mask; of boxes in COCO's or YOLO's layout."""
    kind: Kind = "images"
    """Kind of samples: images or videos with labels, pairs of images, images with masks or boxes."""
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
    classes: str | None = None
    """Number of classes in masks, or a file with a name in each line, as the segmentation job takes it."""
    ignore_index: int = 255
    """Value of pixels in masks that count for nothing."""
    mask_values: tuple[int, ...] | None = None
    """Values of the classes in masks, as the segmentation job takes them."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """File for broken samples, one path and reason per line, as --exclude of a job expects it."""
    workers: int | None = None
    """Number of processes. Default: one per core."""
    json: JsonFile = None


def main(options: Verify) -> None:
    """Index the data, read all samples, print and write the broken ones.

    Raises:
        UsageError: an option is invalid, the data cannot be indexed, or no class but one would be trained.
        DataError: samples are broken (they were printed and written), or the storage does not answer.
    """
    from raydali.commands.examine import Found, examine_images, examine_videos, killed
    from raydali.data.index.exclusion import as_line
    from raydali.data.index.file_rules import describe_skipped
    from raydali.data.tasks.class_check import class_warnings

    workers = process_count(options.workers)
    require_writable("--output", options.output)
    require_writable("--json", options.json)
    samples, total, skipped = 0, Found([]), Counter[str]()
    sources = _sources(options)
    for source in sources:
        samples += len(source)
        skipped.update(getattr(source, "skipped", {}))
        of_source = Found([])
        examine = partial(examine_videos if options.kind == "videos" else examine_images, source)
        in_processes(examine, len(source), workers, options.data, of_source.add, partial(killed, source))
        total.add(of_source)
    broken = total.broken
    show(broken)
    _show_printed(total.printed)
    asked = _decoders(options.kind)
    if options.output is not None:
        head = " ".join(f"# raydali verify {options.data}".splitlines())
        text = f"{head}\n" + "".join(as_line(sample.path, sample.reason) for sample in broken)
        Path(options.output).expanduser().write_bytes(text.encode("utf-8", "surrogateescape"))
    if options.json is not None:
        rows = [{name: asdict(sample)[name] for name in ("id", "path", "reason")} for sample in broken]
        counts: dict[str, Any] = {"samples": samples, "transparent": total.transparent, "for_pillow": total.for_pillow}
        counts |= {"skipped": skipped, "decoders": asked, "printed": total.printed}
        write_json({"data": options.data} | counts | {"broken": rows}, options.json)
    also = f"; {describe_skipped(skipped)}" if skipped else ""
    if total.transparent:
        also += f"; {total.transparent} with transparent pixels, whose alpha is ignored"
    if total.for_pillow:
        also += f"; {total.for_pillow} that the DALI loader hands to Pillow"
    if not broken:
        print(f"{plural(samples, 'sample')}, none broken{also}; asked {asked}")
    try:
        for warning in class_warnings(sources[0]) if options.split in ("train", "all") else ():
            print(f"warning: {warning}", file=sys.stderr)
    except UsageError as error:
        if not broken and len(sources[0].classes) > 1:
            raise
        print(f"warning: {error}", file=sys.stderr)
    if broken:
        remedy = f"a job leaves them out with --exclude {options.output}" if options.output else "-o FILE lists them"
        raise DataError(f"found {plural(len(broken), 'broken sample')} among {samples}: {remedy}{also}; asked {asked}")


_NAMES = {"av": "PyAV", "nvidia-dali-cuda120": "DALI", "pillow": "Pillow"}


def _decoders(kind: Kind) -> str:
    """Return the names and versions of the decoders that are asked."""
    names = ("av",) if kind == "videos" else ("nvidia-dali-cuda120", "pillow")
    return " and ".join(f"{_NAMES[name]} {version(name)}" for name in names)


def _show_printed(printed: dict[str, str]) -> None:
    """Print once what decoders wrote to the terminal by themselves, with the names of the files."""
    if printed:
        lines = [printable(f"{path}: {' '.join(text.split())[:200]}") for path, text in printed.items()]
        print(f"decoders warned of {plural(len(lines), 'file')}, which may look damaged:", file=sys.stderr)
        print(summarize(lines, SHOWN_WARNINGS, separator="\n"), file=sys.stderr)


def _sources(options: Verify) -> list[Any]:
    from raydali.data.index.coco_folder import one_split
    from raydali.data.index.file_list import is_list
    from raydali.data.index.files import absolute
    from raydali.data.index.formats import check_column_options, labeled_images, split_roots
    from raydali.data.index.image_pairs import ImagePairs
    from raydali.data.index.masked_images import train_and_val
    from raydali.data.video.clips import scan_videos

    data = options.data.rstrip("/") or "/"
    splits = ("train", "test") if options.kind == "pairs" else ("train", "val")
    wanted = [split for split in splits if options.split in (split, "all")]
    if not wanted:
        raise UsageError(f"--split must be {' or '.join(splits)} with --kind {options.kind}, not {options.split}")
    names = "label_column", "image_column", "multi_label"
    columns: dict[str, Any] = {name: getattr(options, name) for name in names}
    check_column_options(data, root=options.root, **columns)
    if options.kind != "masks" and options.classes is not None:
        raise UsageError(f"--classes {options.classes} suits only --kind masks: leave it out")
    if options.kind == "masks":
        listed = data if is_list(data) else None
        settings: dict[str, Any] = {"ignored": options.ignore_index, "values": options.mask_values}
        sources = train_and_val(data, listed, classes=options.classes, root=options.root, **settings)
        return sources[:1] if listed else [sources[splits.index(split)] for split in wanted]
    if options.kind == "boxes":
        return [one_split(absolute(data), split) for split in wanted]
    root_of = split_roots(data, splits, files=options.kind == "images")
    if options.split != "all" and not root_of:
        raise UsageError(f"--split {options.split}: {options.data} lacks {' or '.join(splits)}: leave it out")
    roots = [root_of[split] for split in wanted] if root_of else [data]
    if options.kind == "pairs":
        return [ImagePairs.scan(root) for root in roots]
    scan = scan_videos if options.kind == "videos" else None
    return [labeled_images(root, options.root, scan=scan, **columns) for root in roots]


def show(broken: Sequence["BrokenSample"]) -> None:
    """Print the first broken samples, and the number of the others."""
    if broken:
        print(summarize(broken, SHOWN, separator="\n", show=lambda sample: printable(str(sample))))
