"""`raydali bench loader`: how fast loaders deliver batches if nothing uses them.

    raydali bench loader --data ~/imagenet/train --gpus 1,2,4 --json loaders.json
    raydali bench loader --loaders raydali,native,torchvision --threads 2 --workers 2 --batch-size 64

    raydali       make_loader("dali", ...): the stream, crops drawn on the host
    native        a bare DALI pipeline with DALI's own reader and random crop, as in DALI's examples
    torchvision   torch's DataLoader over an ImageFolder: Pillow and torchvision in worker processes
    synthetic     make_loader("synthetic", ...): one resident batch, the cost of handing out batches

Each is an endless generator of batches, which are only counted. All but "synthetic" do the same work: a random resized
crop and flip of each image, `image_size` x `image_size` RGB pixels, in 8 bits or as normalized floats, on the device,
with labels. Each normalizes where its users do: raydali on the device, native in its graph, torchvision in its
processes. Memory layouts differ.

The second command is a regression check for the CPU: its ratios to native and to torchvision must stay above 1.1 and
1.7. Files are read many times, from the page cache unless --data is larger than memory, so the rates do not
include the time of a disk.
"""

import statistics
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from raydali.bench import common, synthetic
from raydali.bench.loader_rates import (
    PIXELS,
    Batches,
    LoadingOptions,
    Task,
    loader_columns,
    loader_rows,
    loader_title,
    measure_loaders,
    row_name,
)
from raydali.output import devices

if TYPE_CHECKING:
    from raydali.data.index.labeled import LabeledFiles
    from raydali.data.load.loader import Loader, LoaderOptions
    from raydali.data.load.make import LoaderName
    from raydali.data.tasks.classification import TrainImages
    from raydali.data.tasks.pipeline import Pipeline

CHOICE = ("raydali", "native", "torchvision", "synthetic")
RIVALS = ("native", "torchvision")
SHUFFLED_AT_ONCE = 4096
"""Number of images in the buffer in which the native reader shuffles."""


@dataclass(frozen=True, kw_only=True)
class LoaderBench(LoadingOptions):
    """Measure how fast loaders deliver batches when nothing uses them, as a table with ratios."""

    make: int = 2048
    """Without --data: number of synthetic images, 130 KB each, in a temporary folder."""
    loaders: str = ",".join(CHOICE)
    """Loaders to measure."""


def main(options: LoaderBench) -> dict[str, Any]:
    """Measure the loaders, show the table and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"loader", "pixels" ("uint8" or
        "float32"), "gpus" (0: the CPU), "images_per_second", and what else `measure_loaders` adds}.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a loader could not be measured; after the other results were shown and written.
    """
    import numpy as np

    from raydali.data.index.labeled import LabeledFiles

    common.check(options, loaders=CHOICE, pixels=PIXELS)
    counts = common.gpu_counts(options.gpus)
    scanned = LabeledFiles.scan(options.data) if options.data is not None else None
    common.check_samples(options, len(scanned) if scanned else options.make, max(counts), devices(max(counts)))
    rows = loader_rows(options, counts)
    if "synthetic" in options.loaders:  # its batches cost the same in all formats
        pixels = common.names(options.pixels)[0]
        rows = [row for row in rows if row["loader"] != "synthetic" or row["pixels"] == pixels]
    with synthetic.folder_or(options.data, partial(synthetic.write_images, count=options.make)) as root:
        source = scanned or LabeledFiles.scan(root)

        def task(row: dict[str, Any]) -> ImageTask:
            return common.task_of(ImageTask, options, loader=row["loader"], root=root, pixels=row["pixels"])

        measure_loaders(rows, task, options, RIVALS)
        # The mean size is estimated from a thousand, since all of them may take long.
        some = np.linspace(0, len(source) - 1, min(1000, len(source))).astype(np.int64).tolist()
        size = round(statistics.mean(len(source.read(id)) for id in some))
    settings = asdict(options) | {"images": len(source), "bytes_per_image": size}
    title = loader_title(f"{len(source):,} images of {size / 1000:,.0f} KB", settings)
    result = common.result_of("bench loader", settings, rows)
    common.present(result, options, title, loader_columns("images", RIVALS))
    common.require_measured(rows, row_name)
    return result


# Code of the processes that measure. Slow imports are inside the functions.


@dataclass(frozen=True, kw_only=True)
class ImageTask(Task):
    """The measurement of a loader of images by one process.

    Attributes:
        augment, erase: the augmentation of raydali's batches.
    """

    augment: str = "none"
    erase: float | None = None

    def batches(self) -> Batches:
        """Start the loader and generate its batches."""
        others = {"native": _native, "torchvision": _torchvision}
        if self.loader in others:
            return others[self.loader](self)
        name: Any = "dali" if self.loader == "raydali" else self.loader
        return our_batches(self, name, self.crops())

    def crops(self) -> "TrainImages":
        """Return raydali's pipeline of random crops."""
        from raydali.data.augment.augmentation import Augmentation
        from raydali.data.tasks.classification import TrainImages

        augmentation = Augmentation(self.augment, self.erase or 0)
        return TrainImages(seed=0, image_size=self.image_size, augmentation=augmentation)


def our_loader(task: Task, name: "LoaderName", source: "LabeledFiles", pipeline: "Pipeline[Any]") -> "Loader":
    """Make raydali's loader of that name for a task."""
    from raydali.data.load.make import make_loader

    where: LoaderOptions = {"rank": task.rank, "world_size": task.world_size, "device": task.device}
    return make_loader(name, source, pipeline, task.endless(len(source)), **where | {"threads": task.threads})


def our_batches(task: Task, name: "LoaderName", pipeline: "Pipeline[Any]") -> Batches:
    """Generate the batches of raydali's loader of that name, in the task's format."""
    import torch

    from raydali.data.index.labeled import LabeledFiles

    if task.gpu:
        torch.cuda.set_device(task.device)
    with our_loader(task, name, LabeledFiles.scan(task.root), pipeline) as loader:
        yield from task.normalise(loader, "images")


def _native(task: ImageTask) -> Batches:
    from nvidia.dali import Pipeline as DaliPipeline
    from nvidia.dali import fn, types

    from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD

    pipeline = DaliPipeline(
        batch_size=task.batch_size,
        num_threads=task.threads,
        device_id=task.rank if task.gpu else None,
        prefetch_queue_depth=2,
        seed=1 + task.rank,
    )
    with pipeline:
        encoded, labels = fn.readers.file(
            file_root=task.root,
            random_shuffle=True,
            initial_fill=SHUFFLED_AT_ONCE,
            shard_id=task.rank,
            num_shards=task.world_size,
        )
        decoder = {"device": "mixed", "hw_decoder_load": 0.95} if task.gpu else {"device": "cpu"}
        images = fn.decoders.image_random_crop(encoded, **decoder)
        images = fn.resize(images, size=(task.image_size, task.image_size))
        mirror: Any = fn.random.coin_flip()
        if task.normalised:
            images = fn.crop_mirror_normalize(
                images,
                mean=[255 * m for m in IMAGENET_MEAN],
                std=[255 * s for s in IMAGENET_STD],
                dtype=types.FLOAT16 if task.pixels == "float16" else types.FLOAT,
                output_layout="HWC",
                mirror=mirror,
            )
        else:
            images = fn.flip(images, horizontal=mirror)
        pipeline.set_outputs(images, labels.gpu() if task.gpu else labels)
    pipeline.build()
    while True:
        yield pipeline.run()


def _torchvision(task: ImageTask) -> Batches:
    import torch
    from torchvision.datasets import ImageFolder as Folder
    from torchvision.transforms import v2

    from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD

    transforms: list[Any] = [v2.RandomResizedCrop(task.image_size, antialias=True), v2.RandomHorizontalFlip()]
    transforms.append(v2.PILToTensor())
    if task.normalised:
        transforms.append(v2.ToDtype(getattr(torch, task.pixels), scale=True))
        transforms.append(v2.Normalize(IMAGENET_MEAN, IMAGENET_STD))
    return task.data_loader(Folder(task.root, v2.Compose(transforms)))
