"""`raydali preview`: draw the first batch of each rank as one picture.

    raydali preview --data ~/imagenet --workers 4
    raydali preview --data train.csv --pipeline val --workers 2 -o sheet.html
    raydali preview --data ~/imagenet --augment trivial --erase 0.25

A loader for each rank delivers its first batch as in training. With the same seed and batch size, the order, the crops,
the flips and the augmentation are the same.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.errors import DataError, UsageError
from raydali.extras import default_loader
from raydali.host.cpu_times import usable_cores
from raydali.output import devices, gpu_names, require_writable
from raydali.text import plural

if TYPE_CHECKING:
    from raydali.data.sources.labeled import LabeledSource
    from raydali.data.stream.stream import MicroBatch, Order
    from raydali.data.tasks.classification import TrainImages, ValidationImages
    from raydali.report.contact_sheet import Picture, Sheet

    Images = TrainImages | ValidationImages

MAX_WORKERS = 64
"""Maximum number of rows of a legible picture."""
MAX_SHOWN = 32


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Draw the first batch of each rank as one picture, and check that no id appears twice."""

    data: str
    """Folder or URI with train/ and val/ of class folders, of which --pipeline selects one; or class folders; or a
    list, a text or CSV file with a line path,label per image; or shards, TFRecord or Parquet files."""
    root: str | None = None
    """Folder or URI that relative paths in a list start from. Default: the list's folder."""
    label_column: str | None = None
    """Column of a list with the labels, by its name in the header, or by its number from 1 after the path; or of
    Parquet files. Default there: label."""
    image_column: str | None = None
    """Column of Parquet files with the images. Default: image."""
    multi_label: bool = False
    """Each column of a list is a label of its own, 0 or 1."""
    pipeline: Literal["train", "val"] = "train"
    """train: shuffled, with random crops and flips; val: in order, with center crops."""
    workers: int = 2
    """Number of ranks; each is a row of the picture."""
    batch_size: int = 8
    """Images per batch, as in the job."""
    show: int = 8
    """Number of images of each batch to draw, from the first."""
    image_size: int = 224
    """Height and width of the model's images, in pixels."""
    resize_size: int | None = None
    """val: length of the shorter side before the center crop. Default: 8/7 of --image-size, as in the job."""
    random_area: tuple[float, float] = (0.08, 1.0)
    """train: smallest and largest area of a crop, as a share of the image."""
    flip_probability: float = 0.5
    """train: probability of a horizontal flip."""
    augment: str = "none"
    """train: policy of augmentation, as in the job."""
    erase: float = 0.0
    """train: probability of random erasing."""
    augment_interpolation: Literal["bilinear", "nearest"] = "bilinear"
    """train: filter of the policy's rotations, shears and translations."""
    seed: int = 0
    """Seed of order, crops and flips."""
    device: str | None = None
    """Device that decodes images: cpu, or the number of a GPU. Default: 0, or cpu on a machine without a GPU."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "sheet.png"
    """File for the picture: .png, or .html with searchable names."""


def main(options: Preview) -> None:
    """Load the batches, write the picture and print the verdict.

    Raises:
        UsageError: an option is invalid; nothing was loaded.
        DataError: an image cannot be read, or an id appears twice; in the second case the picture was written.
    """
    draw = _drawing(options)
    device = _device(options)
    for name, most in (("workers", MAX_WORKERS), ("show", MAX_SHOWN)):
        if not 1 <= getattr(options, name) <= most:
            raise UsageError(f"--{name} must be from 1 to {most}, not {getattr(options, name)}")
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
        raise DataError(f"{sheet.verdict}: each must occur once")


def _drawing(options: Preview) -> Callable[["Sheet"], bytes]:
    from raydali.report.contact_sheet import as_html, as_png

    ending = Path(options.output).suffix.lower()
    require_writable("--output", options.output)
    if ending not in (".png", ".html"):
        raise UsageError(f"--output must end in .png or .html, not {options.output}")
    return as_png if ending == ".png" else as_html


def _device(options: Preview) -> str:
    """Return the device's name in torch."""
    available = len(gpu_names())
    asked = options.device or ("0" if available else "cpu")
    if asked == "cpu":
        return asked
    if not asked.isdecimal():
        raise UsageError(f"--device must be cpu or the number of a GPU from 0, not {asked}")
    if int(asked) >= available:
        there = f"has {devices(available)}, numbered from 0" if available else "has no GPU that CUDA can use"
        raise UsageError(f"--device {asked}: this machine {there}: give cpu or a lower number")
    return f"cuda:{int(asked)}"


def _images(options: Preview) -> tuple["LabeledSource", str]:
    """Return the images of --data, and the folder or list that names them."""
    from raydali.data.sources.files import absolute
    from raydali.data.sources.formats import check_column_options, labeled_images
    from raydali.data.sources.storage import is_folder

    data = options.data
    if all(is_folder(absolute(os.path.join(data, part))) for part in ("train", "val")):  # noqa: PTH118 (or a URI)
        data = os.path.join(data, options.pipeline)  # noqa: PTH118
    names = "label_column", "image_column", "multi_label"
    columns: dict[str, Any] = {name: getattr(options, name) for name in names}
    check_column_options(data, root=options.root, **columns)
    return labeled_images(data, options.root, **columns), data


def _sheet(options: Preview, source: "LabeledSource", place: str, device: str) -> "Sheet":
    from raydali.report.contact_sheet import Row, Sheet

    pipeline = _pipeline(options)
    order = _First(_order(options, source))
    rows, ids = [], []
    for rank in range(options.workers):
        pictures, of_batch = _first_batch(options, source, pipeline, order, rank, device)
        shown, size = len(pictures), len(of_batch)
        caption = plural(size, "image") if shown == size else f"first {shown} of {size}"
        rows.append(Row(f"rank {rank}", caption, pictures))
        ids.append(of_batch)
    twice = {id: count for id, count in Counter(id for of_batch in ids for id in of_batch).items() if count > 1}
    total = sum(map(len, ids))
    if twice:
        first = min(twice)
        where = ", ".join(str(rank) for rank, of_batch in enumerate(ids) for id in of_batch if id == first)
        verdict = f"{len(twice)} of {total} ids come more than once: id {first} at rank {where}"
    else:
        verdict = f"{total} ids, none twice"
    pixels = f"{options.image_size} x {options.image_size} pixels"
    on = "the CPU" if device == "cpu" else f"GPU {device.partition(':')[2]}, {gpu_names()[int(device[5:])]}"
    return Sheet(
        title=f"The first batch of {_ranks(options.workers)}, {options.pipeline} pipeline",
        facts=(
            f"{place}: {len(source):,} images of {len(source.classes):,} classes",
            (
                f"world size {options.workers}, batch size {options.batch_size}, {pixels}, seed {options.seed}, "
                f"decoded on {on}"
            ),
        ),
        rows=rows,
        verdict=verdict,
        good=not twice,
    )


def _ranks(workers: int) -> str:
    return "1 rank" if workers == 1 else f"each of {workers} ranks"


def _pipeline(options: Preview) -> "Images":
    from raydali.data.augment.augmentation import Augmentation
    from raydali.data.tasks.classification import TrainImages, ValidationImages

    if options.pipeline == "val":
        return ValidationImages(image_size=options.image_size, resize_size=options.resize_size)
    return TrainImages(
        image_size=options.image_size,
        seed=options.seed,
        random_area=options.random_area,
        flip_probability=options.flip_probability,
        augmentation=Augmentation(options.augment, options.erase, warp_filter=options.augment_interpolation),
    )


def _order(options: Preview, source: "LabeledSource") -> "Order":
    from raydali.data.stream.stream import OrderedPass, Stream

    size, workers, samples = options.batch_size, options.workers, len(source)
    # Training needs a whole batch per rank, validation one image.
    needed = size * workers if options.pipeline == "train" else size * (workers - 1) + 1
    if samples < needed:
        raise UsageError(
            f"--workers {workers} with --batch-size {size} needs {plural(needed, 'image')}, not {samples}: lower one"
        )
    if options.pipeline == "val":
        return OrderedPass(samples=samples, batch_size=size)
    return Stream(samples=samples, epochs=1, batch_size=size, global_batch_size=size * workers, seed=options.seed)


@dataclass(frozen=True)
class _First:
    """An order that has only the first batch of each rank, so that nothing more is prefetched."""

    order: "Order"

    @property
    def samples(self) -> int:
        return self.order.samples

    def micro_batches(self, rank: int, world_size: int, *, start: int = 0) -> Iterator["MicroBatch"]:
        return islice(self.order.micro_batches(rank, world_size, start=start), 1)


def _first_batch(
    options: Preview,
    source: "LabeledSource",
    pipeline: "Images",
    order: "Order",
    rank: int,
    device: str,
) -> tuple[list["Picture"], list[int]]:
    """Load a rank's first batch; return the pictures to draw, and all its ids."""
    from raydali.data.loading.loader import LoaderOptions
    from raydali.data.loading.make import make_loader
    from raydali.report.contact_sheet import Picture

    where = LoaderOptions(rank=rank, world_size=options.workers, device=device, threads=usable_cores())
    with make_loader(default_loader(), source, pipeline, order, **where) as loader:
        (batch,) = loader
    ids = batch.ids.tolist()
    images = batch["images"][: options.show].permute(0, 2, 3, 1).cpu().numpy()
    labels = batch["labels"][: options.show].tolist()
    shown = [
        Picture(image, _named(source.classes, label), [f"id {id}"], source.path(id))
        for image, id, label in zip(images, ids, labels, strict=False)
    ]
    return shown, ids


def _named(classes: Sequence[str], label: int | list[int]) -> str:
    """The name of a class, or of all labels of a sample."""
    if isinstance(label, int):
        return classes[label]
    return ", ".join(name for name, has in zip(classes, label, strict=True) if has) or "none"
