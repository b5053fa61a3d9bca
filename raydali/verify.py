"""`raydali verify`: which samples cannot be read, before a run finds out.

    raydali verify ~/imagenet -o broken.txt
    python jobs/imagenet.py --data ~/imagenet --exclude broken.txt

Each file is read and decoded as a whole by Pillow, in as many processes as there are cores: what a run calls broken is
broken here, and the other way round (data/quarantine.py).
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from raydali.bench.results import JsonFile, require_writable, write_json
from raydali.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from raydali.data.labeled_files import LabeledSource
    from raydali.data.quarantine import BrokenSample

SPLITS = "train", "val"
SHOWN = 50
SAMPLES_AT_ONCE = 32
"""That a process is given."""
LINE_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Find the images that cannot be read: no file, empty, cut short, no image, absurdly large. Exit code 1: there are
    some."""

    data: tyro.conf.Positional[str]
    """Folder or URI with train/ and val/, or class folders, tar shards, or a list with a line path,label for each
    image."""
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
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if workers < 1:
        raise UsageError(f"--workers must be at least 1, not {workers}")
    require_writable("--output", options.output)
    sources = _sources(options)
    samples, broken = 0, []
    for source in sources:
        samples += len(source)
        broken += _broken(source, workers, str(source))
    for sample in broken[:SHOWN]:
        print(sample)
    if len(broken) > SHOWN:
        print(f"and {len(broken) - SHOWN} more")
    if options.output is not None:
        lines = [f"# raydali verify {options.data}", *(f"{sample.path}\t{sample.reason}" for sample in broken)]
        text = "".join(f"{line}\n" for line in lines)
        Path(options.output).expanduser().write_bytes(text.encode("utf-8", "surrogateescape"))
    if options.json is not None:
        rows = [{name: asdict(sample)[name] for name in ("id", "path", "reason")} for sample in broken]
        write_json({"data": options.data, "samples": samples, "broken": rows}, options.json)
    if broken:
        remedy = f"a job leaves them out by --exclude {options.output}" if options.output else "-o FILE lists them"
        raise DataError(f"{len(broken)} of {samples} samples are broken: {remedy}")
    print(f"{samples} samples, none broken")


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
    samples, some = len(source), SAMPLES_AT_ONCE
    parts = [range(begin, min(begin + some, samples)) for begin in range(0, samples, some)]
    found: list[BrokenSample] = []
    # No fork: those who speak with object stores have threads.
    with ProcessPoolExecutor(min(workers, len(parts)), get_context("spawn"), _keep, (source,)) as processes:
        try:
            with _progress(name, len(source)) as tell:
                for part, of_part in zip(parts, processes.map(_examined, parts), strict=True):
                    found += of_part
                    tell(part.stop, len(found))
        except OSError as error:
            raise DataError(f"cannot go on: {error}") from error
        finally:
            processes.shutdown(cancel_futures=True)
    return found


@contextmanager
def _progress(name: str, samples: int) -> Iterator["Callable[[int, int], None]"]:
    """A bar on a terminal; elsewhere a line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=samples)
            yield lambda done, broken: bar.update(task, completed=done, description=f"{name}: {broken} broken")
        return
    last = time.monotonic()

    def line(done: int, broken: int) -> None:
        nonlocal last
        if done == samples or time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"{name}: {done} of {samples} read, {broken} broken", file=sys.stderr)

    yield line


# In the processes

_source: "LabeledSource"


def _keep(source: "LabeledSource") -> None:
    global _source
    _source = source


def _examined(ids: Sequence[int]) -> list["BrokenSample"]:
    from raydali.data.pillow_images import decoded
    from raydali.data.quarantine import BrokenSample, why_broken

    reasons = ((id, why_broken(partial(_read, decoded, id))) for id in ids)
    return [BrokenSample(id, _source.path(id), reason) for id, reason in reasons if reason is not None]


def _read(decode: "Callable[[bytes], object]", id: int) -> object:
    return decode(_source.read(id))
