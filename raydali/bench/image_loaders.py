"""The loaders that are compared: raydali's, and other ways to load images, each used in the usual way.

    raydali       make_loader("dali", ...): the stream, crops drawn on the host
    native        a bare DALI pipeline with DALI's own reader and random crop, as in DALI's examples
    torchvision   torch's DataLoader over an ImageFolder: Pillow and torchvision in worker processes
    synthetic     make_loader("synthetic", ...): one resident batch, the cost of handing out batches

Each is an endless generator of batches, which are only counted. All but "synthetic" do the same work: a random resized
crop and flip of each image, `image_size` x `image_size` RGB pixels, in 8 bits or as normalized floats, on the device,
with labels. Each normalizes where its users do: raydali on the device, native in its graph,
torchvision in its processes. Memory layouts differ.

Each loader runs in its own process, so slow imports are inside the functions.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from raydali.data.augment.augmentation import Augmentation
from raydali.data.sources.labeled import LabeledFiles
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.data.tasks.settings import DecoderSettings

if TYPE_CHECKING:
    import torch

    from raydali.data.loading.loader import Batch, Loader, LoaderOptions
    from raydali.data.loading.make import LoaderName

Batches = Generator[Any, None, None]
Pixels = Literal["uint8", "float16", "float32"]
"""Format of a batch: images in 8 bits, or floats normalized by ImageNet's mean and deviation."""

EPOCHS = 1 << 20
"""A number of epochs that takes longer than any measurement."""
SHUFFLED_AT_ONCE = 4096
"""Number of images in the buffer in which the native reader shuffles."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The measurement of one process.

    Attributes:
        loader: a name in LOADERS.
        root: a folder of class folders of images.
        batch_size: images per batch.
        image_size: height and width of the output, pixels.
        threads: of DALI.
        workers: processes of torch's DataLoader.
        seconds: length of the timed segment, after a warm-up.
        pixels: the format that is delivered.
        gpu: whether batches go to GPU `rank`, or to the CPU's memory.
        rank, world_size: this process, and the number of processes that measure at once.
        augment, erase: the augmentation of raydali's batches.
    """

    loader: str
    root: str
    batch_size: int
    image_size: int
    threads: int
    workers: int
    seconds: float
    pixels: Pixels = "uint8"
    gpu: bool = False
    rank: int = 0
    world_size: int = 1
    augment: str = "none"
    erase: float | None = None

    @property
    def device(self) -> str:
        """The device's name in torch."""
        return f"cuda:{self.rank}" if self.gpu else "cpu"

    @property
    def normalised(self) -> bool:
        """True if the loader delivers normalized floats."""
        return self.pixels != "uint8"

    @property
    def contender(self) -> "Contender":
        """The loader that is measured."""
        return LOADERS[self.loader]


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A loader that can be measured.

    Attributes:
        batches: starts the loader and generates its batches.
        parallel: whether several processes make whole batches, which then arrive in bursts.
        all_queues: whether all hardware queues of CUDA are requested, as in raydali's jobs.
    """

    batches: Callable[[Task], Batches]
    parallel: bool = False
    all_queues: bool = False


def _crops(task: Task) -> TrainImages:
    return TrainImages(seed=0, image_size=task.image_size, augmentation=Augmentation(task.augment, task.erase or 0))


def _ours(task: Task, name: "LoaderName", pipeline: Pipeline[Any]) -> Batches:
    import torch

    if task.gpu:
        torch.cuda.set_device(task.device)
    with our_loader(task, name, LabeledFiles.scan(task.root), pipeline) as loader:
        yield from normalised(task, loader, "images")


def our_loader(task: Task, name: "LoaderName", source: LabeledFiles, pipeline: Pipeline[Any]) -> "Loader":
    """Make raydali's loader of that name for a task."""
    from raydali.data.loading.make import make_loader

    order = endless(len(source), task.batch_size, task.world_size)
    where: LoaderOptions = {"rank": task.rank, "world_size": task.world_size, "device": task.device}
    return make_loader(name, source, pipeline, order, **where | {"threads": task.threads})


def normalised(task: Task, batches: "Iterable[Batch]", name: str) -> Batches:
    """Convert raydali's batches to the task's format, by `Normalized` on the device as jobs do."""
    import torch

    from raydali.train.models.normalized import Normalized

    model = Normalized(torch.nn.Identity()).to(task.device)
    for batch in batches:
        yield (model(batch[name]).to(getattr(torch, task.pixels)), batch["labels"]) if task.normalised else batch


def endless(samples: int, batch_size: int, world_size: int) -> Stream:
    """Return EPOCHS epochs of samples for `world_size` processes, one batch per process and step."""
    global_batch_size = batch_size * world_size
    return Stream(samples=samples, epochs=EPOCHS, batch_size=batch_size, global_batch_size=global_batch_size, seed=0)


@dataclass(frozen=True, kw_only=True)
class ResizedImages(Pipeline[LabeledFiles]):
    """A pipeline of resized images in 8 bits, on CPUs and GPUs.

    Args:
        image_size: height and width of the output, pixels; aspect ratios are not kept.
    """

    image_size: int

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images (N, image_size, image_size, 3) uint8 and labels (N,) int64."""
        return "images", "labels"

    def inputs(self, source: LabeledFiles, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Inputs:
        """Return files and labels (N,) int64."""
        return source.files(ids), source.labels[ids]

    def graph(self, source: LabeledFiles, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Read and decode images, and resize them with antialiasing."""
        from nvidia.dali import fn

        files, labels = inputs
        contents = fn.io.file.read(files) if source.dali_reads else files
        images = fn.decoders.image(contents, **DecoderSettings(largest_image=(0, 0)).decoder_options(device))
        images = fn.resize(images, size=(self.image_size, self.image_size))
        return images, labels.gpu() if device == "gpu" else labels

    def sample(self, source: LabeledFiles, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same, made by Pillow and torchvision: image (3, image_size, image_size) uint8, label."""
        import torch
        from torchvision.transforms.v2 import functional as F

        from raydali.data.tasks.pillow import decoded

        image = F.resize(decoded(source.read(id)), [self.image_size] * 2)
        return F.pil_to_tensor(image), torch.tensor(source.labels[id])


def _native(task: Task) -> Batches:
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


def _torchvision(task: Task) -> Batches:
    import torch
    from torchvision.transforms import v2

    from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD

    crop = v2.RandomResizedCrop(task.image_size, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()
    if not task.normalised:
        return _folder_batches(task, *crop)
    to_floats = v2.ToDtype(getattr(torch, task.pixels), scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    return _folder_batches(task, *crop, *to_floats)


def _torchvision_resize(task: Task) -> Batches:
    from torchvision.transforms import v2

    return _folder_batches(task, v2.Resize([task.image_size, task.image_size], antialias=True), v2.PILToTensor())


def _folder_batches(task: Task, *transforms: Any) -> Batches:
    from torchvision.datasets import ImageFolder as Folder
    from torchvision.transforms import v2

    return data_loader_batches(task, Folder(task.root, v2.Compose(transforms)))


def data_loader_batches(task: Task, dataset: Any) -> Batches:
    """Generate a dataset's batches by torch's DataLoader, on the device."""
    from torch.utils.data import DataLoader, RandomSampler

    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=task.batch_size,
        # One long epoch, because the workers would be idle between epochs.
        sampler=RandomSampler(dataset, num_samples=len(dataset) * EPOCHS),
        num_workers=task.workers,
        multiprocessing_context="fork",  # the default of users; spawned processes would spawn
        persistent_workers=True,
        pin_memory=task.gpu,
        drop_last=True,
    )
    for batch in loader:
        yield [tensor.to(task.device, non_blocking=True) for tensor in batch]


LOADERS = {
    "raydali": Contender(batches=lambda task: _ours(task, "dali", _crops(task)), all_queues=True),
    "native": Contender(batches=_native),
    "torchvision": Contender(batches=_torchvision, parallel=True),
    "synthetic": Contender(batches=lambda task: _ours(task, "synthetic", _crops(task))),
    # Whole images resized, as in `raydali bench loader --seed-table`.
    "raydali-resize": Contender(
        batches=lambda task: _ours(task, "dali", ResizedImages(image_size=task.image_size)), all_queues=True
    ),
    "torchvision-resize": Contender(batches=_torchvision_resize, parallel=True),
}
