"""`raydali verify`: find the samples that cannot be read, before a run.

    raydali verify ~/imagenet -o broken.txt
    python jobs/imagenet.py --data ~/imagenet --exclude broken.txt

Each file is read and decoded completely by DALI and Pillow (both_decoders.py), or by FFmpeg, in as many processes as
there are cores. These may die of a file, which is named. A run uses the same criterion for broken samples
(data/loading/quarantine.py).
"""

import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.errors import DataError, UsageError
from raydali.host.process_pool import in_processes, process_count
from raydali.output import JsonFile, require_writable, write_json
from raydali.text import plural, summarize

if TYPE_CHECKING:
    from raydali.commands.both_decoders import Seen
    from raydali.data.loading.quarantine import BrokenSample
    from raydali.data.sources.coco import Coco
    from raydali.data.sources.files import Files
    from raydali.data.sources.image_pairs import ImagePairs
    from raydali.data.sources.labeled import LabeledFiles, LabeledSource
    from raydali.data.sources.source import Source

SHOWN, SHOWN_WARNINGS = 50, 10
FRAMES_AT_ONCE = 256
Kind = Literal["images", "pairs", "boxes", "videos"]


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
        for_pillow: number of other samples that the DALI loader hands to Pillow.
        printed: what decoders wrote to the terminal, by path.
    """

    broken: list["BrokenSample"]
    transparent: int = 0
    for_pillow: int = 0
    printed: dict[str, str] = field(default_factory=dict)

    def add(self, more: "Found") -> int:
        """Add the findings about other samples; return the number of broken ones so far."""
        self.broken += more.broken
        self.transparent += more.transparent
        self.for_pillow += more.for_pillow
        self.printed |= more.printed
        return len(self.broken)


def main(options: Verify) -> None:
    """Index the data, read all samples, print and write the broken ones.

    Raises:
        UsageError: an option is invalid, or the data cannot be indexed.
        DataError: samples are broken (they were printed and written), or the storage does not answer.
    """
    from raydali.data.sources.exclusion import as_line
    from raydali.data.sources.file_rules import describe_skipped

    workers = process_count(options.workers)
    require_writable("--output", options.output)
    require_writable("--json", options.json)
    samples, found, skipped = 0, Found([]), Counter[str]()
    for source in _sources(options):
        samples += len(source)
        skipped.update(getattr(source, "skipped", {}))
        of_source = Found([])
        examine, killed = partial(_EXAMINE[options.kind], source), partial(_killed, source)
        in_processes(examine, len(source), workers, options.data, of_source.add, killed)
        found.add(of_source)
    broken = found.broken
    show(broken)
    _show_printed(found.printed)
    asked = _decoders(options.kind)
    if options.output is not None:
        head = " ".join(f"# raydali verify {options.data}".splitlines())
        text = f"{head}\n" + "".join(as_line(sample.path, sample.reason) for sample in broken)
        Path(options.output).expanduser().write_bytes(text.encode("utf-8", "surrogateescape"))
    if options.json is not None:
        rows = [{name: asdict(sample)[name] for name in ("id", "path", "reason")} for sample in broken]
        counts: dict[str, Any] = {"samples": samples, "transparent": found.transparent, "for_pillow": found.for_pillow}
        counts |= {"skipped": skipped, "decoders": asked, "printed": found.printed}
        write_json({"data": options.data} | counts | {"broken": rows}, options.json)
    also = f"; {describe_skipped(skipped)}" if skipped else ""
    if found.transparent:
        also += f"; {found.transparent} with transparent pixels, whose alpha is ignored"
    if found.for_pillow:
        also += f"; {found.for_pillow} that the DALI loader hands to Pillow"
    if broken:
        remedy = f"a job leaves them out with --exclude {options.output}" if options.output else "-o FILE lists them"
        raise DataError(f"found {plural(len(broken), 'broken sample')} among {samples}: {remedy}{also}; asked {asked}")
    print(f"{plural(samples, 'sample')}, none broken{also}; asked {asked}")


_NAMES = {"av": "PyAV", "nvidia-dali-cuda120": "DALI", "pillow": "Pillow"}


def _decoders(kind: Kind) -> str:
    """Return the names and versions of the decoders that are asked."""
    names = ("av",) if kind == "videos" else ("nvidia-dali-cuda120", "pillow")
    return " and ".join(f"{_NAMES[name]} {version(name)}" for name in names)


def _show_printed(printed: dict[str, str]) -> None:
    """Print once what decoders wrote to the terminal by themselves, with the names of the files."""
    if printed:
        lines = [f"{path}: {' '.join(text.split())[:200]}" for path, text in printed.items()]
        print(f"decoders warned of {plural(len(lines), 'file')}, which may look damaged:", file=sys.stderr)
        shown = summarize(lines, SHOWN_WARNINGS, separator="\n")
        print(shown.encode("utf-8", "backslashreplace").decode(), file=sys.stderr)


def _sources(options: Verify) -> list[Any]:
    from raydali.data.sources.coco_folder import one_split
    from raydali.data.sources.files import absolute
    from raydali.data.sources.folder_layout import split_files
    from raydali.data.sources.formats import check_column_options, kind_and_files, labeled_images
    from raydali.data.sources.image_pairs import ImagePairs
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
    if options.kind == "images" and not there and len(kind_and_files(data)[1]) > 1:
        files = split_files(data, None)
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


def _killed(source: "Source", id: int, reason: str) -> Found:
    from raydali.data.loading.quarantine import BrokenSample

    return Found([BrokenSample(id, source.path(id), reason)])


def _examine_images(files_of: "FilesOf", source: Any, ids: Sequence[int]) -> Found:  # noqa: ANN401 (of each kind)
    """Examine samples of image files: read all of them, and ask the decoders."""
    from raydali.commands.both_decoders import ask_decoders
    from raydali.data.loading.quarantine import BrokenSample, describe_error, refusal

    found, of_files = Found([]), {}
    contents: list[bytes] = []

    def read(id: int) -> None:
        data = [files.read(id) for files in files_of(source)]
        of_files[id] = range(len(contents), len(contents) + len(data))
        contents.extend(data)

    errors = {id: refusal(partial(read, id)) for id in ids}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow, about palettes with transparency and large images
        seen = ask_decoders(contents)
    for id in ids:
        path, of_id = source.path(id), [seen[place] for place in of_files.get(id, ())]
        error = errors[id] or _misfit(source, id, of_id)
        if error is not None:
            reason = describe_error(error)
            for prefix in (f"{path} cannot be read: ", f"{path}: "):
                reason = reason.removeprefix(prefix)
            found.broken.append(BrokenSample(id, path, reason))
        else:
            found.transparent += any(each.transparent for each in of_id)
            found.for_pillow += any(each.for_pillow for each in of_id)
        if printed := "".join(each.printed for each in of_id):
            found.printed[path] = printed
    return found


def _misfit(source: Any, id: int, seen: Sequence["Seen"]) -> Exception | None:  # noqa: ANN401 (of each kind)
    """Return why a sample cannot be trained on: an image is broken, or its size is not that of its pair or boxes."""
    from raydali.data.sources.coco import Coco

    for files, each in zip(_files_of_pairs(source) if len(seen) > 1 else [source], seen, strict=True):
        if each.error is not None:
            return DataError(f"{files.path(id)}: {each.error}") if len(seen) > 1 else each.error
    sizes = [f"{each.shape[1]}x{each.shape[0]}" for each in seen if each.shape is not None]
    if len({*sizes}) > 1:
        return DataError(f"{' and '.join(sorted(sizes))} pixels: both images of a pair must have the same size")
    if isinstance(source, Coco):
        height, width = source.sizes[id].tolist()
        if height and width and seen[0].shape != (height, width):
            return DataError(f"{sizes[0]} pixels, but {width}x{height} in the annotations")
    return None


def _examine_videos(source: "LabeledFiles", ids: Sequence[int]) -> Found:
    from raydali.data.loading.quarantine import BrokenSample, why_broken

    reasons = {id: why_broken(partial(_load_video, source, id)) for id in ids}
    found = [(id, reason.removeprefix(f"{source.path(id)}: ")) for id, reason in reasons.items() if reason is not None]
    return Found([BrokenSample(id, source.path(id), reason) for id, reason in found])


def _load_video(source: "LabeledFiles", id: int) -> None:
    from raydali.data.sources.video.packets import read_clip_packets, read_video_info
    from raydali.data.tasks.video import decoded

    path = source.path(id)
    facts = read_video_info(path)
    for first in range(0, facts.frames, FRAMES_AT_ONCE):
        with read_clip_packets(path, facts, first, 1, min(FRAMES_AT_ONCE, facts.frames - first)) as part:
            decoded(part, lambda _: None)


FilesOf = Callable[[Any], Sequence[Any]]


def _files_of_pairs(source: "ImagePairs") -> Sequence["Files"]:
    return source.inputs, source.targets


def _files_of_images(source: "LabeledSource | Coco") -> Sequence["LabeledSource | Coco"]:
    return (source,)


_EXAMINE: dict[Kind, Callable[[Any, Sequence[int]], Found]] = {
    "images": partial(_examine_images, _files_of_images),
    "pairs": partial(_examine_images, _files_of_pairs),
    "boxes": partial(_examine_images, _files_of_images),
    "videos": _examine_videos,
}
