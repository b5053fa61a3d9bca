"""`raydali preview`: what each rank gets first, as one picture.

    raydali preview --data ~/imagenet --workers 4
    raydali preview --data train.csv --pipeline val --workers 2 -o sheet.html

A loader for each rank gives its first batch, as in training: the same order, crops and flips for the same seed and
batch size.
"""

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.errors import DataError, UsageError
from raydali.host.cpu_times import usable_cores
from raydali.output import devices, gpu_names, require_writable

if TYPE_CHECKING:
    from raydali.data.sources.labeled import LabeledSource
    from raydali.data.stream.stream import MicroBatch, Order
    from raydali.report.contact_sheet import Picture, Sheet

MAX_WORKERS = 64
"""A picture with more rows cannot be read."""
MAX_SHOWN = 32


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Draw the first batch of each rank as one picture, and check that no id appears twice."""

    data: str
    """Folder or URI with train/ and val/ of class folders, of which --pipeline takes one; or class folders themselves;
    or a list, a text or CSV file with a line path,label for each image."""
    root: str | None = None
    """Folder or URI that relative paths in a list begin at. Default: the list's folder."""
    pipeline: Literal["train", "val"] = "train"
    """train: shuffled, cropped and flipped at random; val: in order, the centre."""
    workers: int = 2
    """Ranks, a row of the picture each."""
    batch_size: int = 8
    """Images of a batch, as the job's."""
    show: int = 8
    """How many images of each batch are drawn, from its first on."""
    image_size: int = 224
    """Side of the square images that the model gets, in pixels."""
    resize_size: int | None = None
    """val: the shorter side is resized to this before the centre crop. Default: 8/7 of --image-size, as the job's."""
    random_area: tuple[float, float] = (0.08, 1.0)
    """train: smallest and largest share of an image's area that a crop takes."""
    flip_probability: float = 0.5
    """train: how often an image is mirrored."""
    seed: int = 0
    """Of order, crops and flips."""
    device: str | None = None
    """Where images are decoded: cpu, or the number of a GPU. Default: 0, or cpu on a machine with no GPU."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "sheet.png"
    """File for the picture, .png; or .html, where names can be searched and pointed at."""


def main(options: Preview) -> None:
    """Load, draw, write, and say what was found.

    Raises:
        UsageError: an option that cannot be met; before anything is loaded.
        DataError: an image cannot be read; an id appears twice, after the picture was written.
    """
    draw = _drawing(options)
    device = _device(options)
    for name, most in (("workers", MAX_WORKERS), ("show", MAX_SHOWN)):
        if not 1 <= getattr(options, name) <= most:
            raise UsageError(f"--{name} must lie in 1..{most}, not {getattr(options, name)}")
    if options.batch_size < 1:
        raise UsageError(f"--batch-size must be at least 1, not {options.batch_size}")
    source, place = _images(options)
    sheet = _sheet(options, source, place, device)
    try:
        Path(options.output).expanduser().write_bytes(draw(sheet))
    except OSError as error:
        raise UsageError(f"--output {options.output} cannot be written: {error.strerror}; give another file") from error
    print(f"{options.output}: the first batch of {_ranks(options.workers)}: {sheet.verdict}")
    if not sheet.good:
        raise DataError(f"{sheet.verdict}: each must come once")


def _drawing(options: Preview) -> Any:
    from raydali.report.contact_sheet import as_html, as_png

    ending = Path(options.output).suffix.lower()
    require_writable("--output", options.output)
    if ending not in (".png", ".html"):
        raise UsageError(f"--output {options.output} is neither .png nor .html: give a file with one of these endings")
    return as_png if ending == ".png" else as_html


def _device(options: Preview) -> str:
    """As torch calls it."""
    available = len(gpu_names())
    asked = options.device or ("0" if available else "cpu")
    if asked == "cpu":
        return asked
    if not asked.isdecimal():
        raise UsageError(f"--device {asked} is no device: give cpu, or the number of a GPU, from 0")
    if int(asked) >= available:
        there = f"has {devices(available)}, numbered from 0" if available else "has no GPU that CUDA can use"
        raise UsageError(f"--device {asked}: this machine {there}: give cpu or a lower number")
    return f"cuda:{int(asked)}"


def _images(options: Preview) -> tuple["LabeledSource", str]:
    """The images of --data, and where they are listed."""
    from raydali.data.sources.formats import check_root, labeled_images

    data = options.data
    if all(_is_folder(os.path.join(data, part)) for part in ("train", "val")):
        data = os.path.join(data, options.pipeline)
    check_root(options.root, data)
    return labeled_images(data, options.root), data


def _is_folder(path: str) -> bool:
    from pyarrow.fs import FileType

    from raydali.data.sources import storage
    from raydali.data.sources.files import absolute

    path = absolute(path)
    if "://" not in path:
        return os.path.isdir(path)
    try:
        (found,) = storage.file_system(path).get_file_info([path.partition("://")[2]])
    except OSError:  # listing it says why, and better
        return False
    return bool(found.type == FileType.Directory)


def _sheet(options: Preview, source: "LabeledSource", place: str, device: str) -> "Sheet":
    from raydali.report.contact_sheet import Sheet

    pipeline = _pipeline(options)
    order = _First(_order(options, source))
    ranks, ids = [], []
    for rank in range(options.workers):
        pictures, of_batch = _first_batch(options, source, pipeline, order, rank, device)
        ranks.append(pictures)
        ids.append(of_batch)
    twice = {id: count for id, count in Counter(id for of_batch in ids for id in of_batch).items() if count > 1}
    total = sum(map(len, ids))
    if twice:
        first = min(twice)
        where = ", ".join(str(rank) for rank, of_batch in enumerate(ids) for id in of_batch if id == first)
        verdict = f"{len(twice)} of {total} ids come more than once: id {first} at rank {where}"
    else:
        verdict = f"{total} ids, none twice"
    size = f"{options.image_size} x {options.image_size} pixels"
    on = "the CPU" if device == "cpu" else f"GPU {device.partition(':')[2]}, {gpu_names()[int(device[5:])]}"
    return Sheet(
        title=f"The first batch of {_ranks(options.workers)}, {options.pipeline} pipeline",
        facts=(
            f"{place}: {len(source):,} images of {len(source.classes):,} classes",
            (
                f"world size {options.workers}, batch size {options.batch_size}, {size}, seed {options.seed}, "
                f"decoded on {on}"
            ),
        ),
        verdict=verdict,
        good=not twice,
        ranks=ranks,
        sizes=[len(of_batch) for of_batch in ids],
    )


def _ranks(workers: int) -> str:
    return "1 rank" if workers == 1 else f"each of {workers} ranks"


def _pipeline(options: Preview) -> Any:
    from raydali.data.tasks.classification import TrainImages, ValidationImages

    if options.pipeline == "val":
        return ValidationImages(image_size=options.image_size, resize_size=options.resize_size)
    return TrainImages(
        image_size=options.image_size,
        seed=options.seed,
        random_area=options.random_area,
        flip_probability=options.flip_probability,
    )


def _order(options: Preview, source: "LabeledSource") -> "Order":
    from raydali.data.stream.stream import OrderedPass, Stream

    size, workers, samples = options.batch_size, options.workers, len(source)
    # Training needs a whole batch for each rank, validation an image.
    needed = size * workers if options.pipeline == "train" else size * (workers - 1) + 1
    if samples < needed:
        raise UsageError(
            f"--workers {workers} with --batch-size {size} needs {needed} images, there are {samples}: lower one"
        )
    if options.pipeline == "val":
        return OrderedPass(samples=samples, batch_size=size)
    return Stream(samples=samples, epochs=1, batch_size=size, global_batch_size=size * workers, seed=options.seed)


@dataclass(frozen=True)
class _First:
    """The first batch of each rank and no more, so that nothing is read ahead."""

    order: "Order"

    @property
    def samples(self) -> int:
        return self.order.samples

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator["MicroBatch"]:
        return islice(self.order.micro_batches(rank, world_size, start=start), 1)


def _first_batch(
    options: Preview, source: "LabeledSource", pipeline: Any, order: "Order", rank: int, device: str
) -> tuple[list["Picture"], list[int]]:
    """What is shown of a rank's first batch, and all its ids."""
    from raydali.data.loading.loader import LoaderOptions
    from raydali.data.loading.make import make_loader
    from raydali.report.contact_sheet import Picture

    where = LoaderOptions(rank=rank, world_size=options.workers, device=device, threads=usable_cores())
    with make_loader("dali", source, pipeline, order, **where) as loader:
        (batch,) = loader
    ids = batch.ids.tolist()
    images = batch["images"][: options.show].permute(0, 2, 3, 1).cpu().numpy()
    labels = batch["labels"][: options.show].tolist()
    shown = [
        Picture(image, id, source.classes[label], source.path(id))
        for image, id, label in zip(images, ids, labels, strict=False)
    ]
    return shown, ids
