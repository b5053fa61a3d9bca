"""`raydali verify`: which samples cannot be read, before a run finds out.

    raydali verify ~/imagenet -o broken.txt
    python jobs/imagenet.py --data ~/imagenet --exclude broken.txt

Each file is read and decoded as a whole by Pillow, in as many processes as there are cores: what a run calls broken is
broken here, and the other way round (data/quarantine.py).
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from raydali.command_output import JsonFile, require_writable, write_json
from raydali.errors import DataError, UsageError
from raydali.parallel import in_processes, process_count

if TYPE_CHECKING:
    from raydali.data.labeled_files import LabeledSource
    from raydali.data.quarantine import BrokenSample

SPLITS = "train", "val"
SHOWN = 50


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Find the images that cannot be read: no file, empty, cut short, no image, absurdly large. Exit code 1: there are
    some."""

    data: tyro.conf.Positional[str]
    """Folder or URI with train/ and val/, or class folders, tar shards, TFRecord files, or a list with a line
    path,label for each image."""
    split: Literal["train", "val", "all"] = "all"
    """Which of train/ and val/."""
    root: str | None = None
    """Folder or URI that relative paths in a list begin at. Default: the list's folder."""
    output: Annotated[str | None, tyro.conf.arg(aliases=["-o"])] = None
    """File for what is broken, a path and a reason a line: what a job's --exclude takes."""
    workers: int | None = None
    """Processes. Default: one for each core."""
    json: JsonFile = None


def main(options: Verify) -> None:
    """Index, read, say and write what is broken.

    Raises:
        UsageError: an option that cannot be met, or data that cannot be indexed.
        DataError: something is broken, after it was told and written; or the storage does not answer.
    """
    from raydali.data.exclusion import as_line
    from raydali.data.skipped_files import in_words

    workers = process_count(options.workers)
    require_writable("--output", options.output)
    sources = _sources(options)
    samples, broken, skipped = 0, [], Counter[str]()
    for source in sources:
        samples += len(source)
        skipped.update(source.skipped)
        broken += _broken(source, workers, str(source))
    show(broken)
    if options.output is not None:
        head = " ".join(f"# raydali verify {options.data}".splitlines())
        text = f"{head}\n" + "".join(as_line(sample.path, sample.reason) for sample in broken)
        Path(options.output).expanduser().write_bytes(text.encode("utf-8", "surrogateescape"))
    if options.json is not None:
        rows = [{name: asdict(sample)[name] for name in ("id", "path", "reason")} for sample in broken]
        write_json({"data": options.data, "samples": samples, "broken": rows, "skipped": skipped}, options.json)
    also = f"; {in_words(skipped)}" if skipped else ""
    if broken:
        remedy = f"a job leaves them out by --exclude {options.output}" if options.output else "-o FILE lists them"
        raise DataError(f"{len(broken)} of {samples} samples are broken: {remedy}{also}")
    print(f"{samples} samples, none broken{also}")


def _sources(options: Verify) -> list["LabeledSource"]:
    from raydali.data.labeled_images import check_root, labeled_images
    from raydali.preview import _is_folder

    data = options.data.rstrip("/") or "/"
    there = [split for split in SPLITS if _is_folder(os.path.join(data, split))]
    wanted = [split for split in SPLITS if options.split in (split, "all")]
    if set(there) == set(SPLITS):
        check_root(options.root, data)
        return [labeled_images(os.path.join(data, split)) for split in wanted]
    if options.split != "all":
        raise UsageError(f"--split {options.split}: {options.data} does not hold {' and '.join(SPLITS)}: leave it out")
    check_root(options.root, data)
    return [labeled_images(data, options.root)]


def _broken(source: "LabeledSource", workers: int, name: str) -> list["BrokenSample"]:
    """What is broken, by id."""
    found: list[BrokenSample] = []

    def take(more: "Iterable[BrokenSample]") -> int:
        found.extend(more)
        return len(found)

    in_processes(partial(_examined, source), len(source), workers, name, take)
    return found


def show(broken: Sequence["BrokenSample"]) -> None:
    """Print the first of them, and how many more there are."""
    for sample in broken[:SHOWN]:
        print(str(sample).encode("utf-8", "backslashreplace").decode())  # names may be any bytes
    if len(broken) > SHOWN:
        print(f"and {len(broken) - SHOWN} more")


def _examined(source: "LabeledSource", ids: Iterable[int]) -> list["BrokenSample"]:
    """In the processes."""
    from raydali.data.pillow_images import decoded
    from raydali.data.quarantine import BrokenSample, why_broken

    def load(id: int) -> object:
        return decoded(source.read(id))

    reasons = ((id, why_broken(partial(load, id))) for id in ids)
    return [BrokenSample(id, source.path(id), reason) for id, reason in reasons if reason is not None]
