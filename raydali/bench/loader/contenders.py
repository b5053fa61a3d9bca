"""The loaders that are measured: ours, and the ways in which others feed a GPU, each as its users would write it.

    raydali       make_loader("dali", ...): the stream, crops drawn on the host
    native        a bare DALI pipeline around DALI's own reader and random crop, as in DALI's examples
    torchvision   torch's DataLoader over an ImageFolder: Pillow and torchvision in worker processes
    spdl          SPDL, where it is installed: FFmpeg decodes, crops and resizes in threads
    synthetic     make_loader("synthetic", ...): one resident batch, what handing out costs

Each is an endless generator of batches, of which only the number is looked at. All but "synthetic" do the same work:
a random resized crop and flip of each image, `image_size` x `image_size` RGB pixels, in 8 bits or as normalised floats,
on the device, with labels (SPDL: without). Where a loader normalises is its own affair: ours and SPDL on the device,
as their users do, native in its graph, torchvision in its processes. Layouts of memory differ.

A loader runs in a process of its own, so whatever is slow to import is imported inside.
"""

import importlib.util
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raydali.data.sources.image_folder import ImageFolder
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import TrainImages
from raydali.data.tasks.pipeline import Pipeline

if TYPE_CHECKING:
    from raydali.data.loading.loader import Batch

Deliveries = Generator[Any, None, None]
Pixels = Literal["uint8", "float16", "float32"]
"""A batch holds images in 8 bits, or floats normalised by ImageNet's mean and deviation."""

EPOCHS = 1 << 20
"""More than any measurement lasts."""
SHUFFLED_AT_ONCE = 4096
"""Images in the native reader's buffer, out of which it draws: the only shuffling it knows."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one process measures.

    Attributes:
        loader: a name in LOADERS.
        root: a folder of class folders of images.
        batch_size: images of a batch.
        image_size: height and width of what comes out, pixels.
        threads: DALI's or SPDL's.
        workers: processes of torch's DataLoader.
        seconds: how long, after a warm-up.
        pixels: what is delivered.
        gpu: whether batches go to GPU `rank`; else to the CPU's memory.
        rank, world_size: this process, and how many measure at once.
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

    @property
    def device(self) -> str:
        """As torch names it."""
        return f"cuda:{self.rank}" if self.gpu else "cpu"

    @property
    def normalised(self) -> bool:
        """Return whether the loader delivers floats."""
        return self.pixels != "uint8"

    @property
    def measured(self) -> "Measured":
        """How the loader is measured."""
        return LOADERS[self.loader]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A loader that can be measured.

    Attributes:
        deliver: its batches.
        parallel: whether its processes are many, each making a whole batch: these then arrive in bursts.
        all_queues: whether the environment asks CUDA for all hardware queues, as raydali's jobs do.
        module: that it needs and raydali does not.
    """

    deliver: Callable[[Task], Deliveries]
    parallel: bool = False
    all_queues: bool = False
    module: str | None = None

    @property
    def is_installed(self) -> bool:
        """Whether this machine has that module."""
        return self.module is None or importlib.util.find_spec(self.module) is not None


def _raydali(task: Task) -> Deliveries:
    return _ours(task, "dali", TrainImages(seed=0, image_size=task.image_size))


def _synthetic(task: Task) -> Deliveries:
    return _ours(task, "synthetic", TrainImages(seed=0, image_size=task.image_size))


def _raydali_resize(task: Task) -> Deliveries:
    from raydali.bench.loader.resized import ResizedImages

    return _ours(task, "dali", ResizedImages(image_size=task.image_size))


def _ours(task: Task, name: Literal["dali", "synthetic"], pipeline: Pipeline[Any]) -> Deliveries:
    import torch

    from raydali.data.loading.make import make_loader

    if task.gpu:
        torch.cuda.set_device(task.device)
    source = ImageFolder.scan(task.root)
    with make_loader(
        name,
        source,
        pipeline,
        endless(len(source), task.batch_size, task.world_size),
        rank=task.rank,
        world_size=task.world_size,
        device=task.device,
        threads=task.threads,
    ) as loader:
        yield from normalised(task, loader, "images")


def normalised(task: Task, batches: "Iterable[Batch]", name: str) -> Deliveries:
    """Our batches as the task wants them: normalised as the jobs do it, on the device by `Normalized`."""
    import torch

    from raydali.train.models.normalized import Normalized

    model = Normalized(torch.nn.Identity()).to(task.device)
    for batch in batches:
        yield (model(batch[name]).to(getattr(torch, task.pixels)), batch["labels"]) if task.normalised else batch


def endless(samples: int, batch_size: int, world_size: int) -> Stream:
    """The order of so many samples for so many processes, each of which has a batch of a step; EPOCHS of it."""
    return Stream(
        samples=samples, epochs=EPOCHS, batch_size=batch_size, global_batch_size=batch_size * world_size, seed=0
    )


def _native(task: Task) -> Deliveries:
    from nvidia.dali import Pipeline as DaliPipeline
    from nvidia.dali import fn, types

    from raydali.train.models.normalized import IMAGENET_MEAN, IMAGENET_STD

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


def _torchvision(task: Task) -> Deliveries:
    import torch
    from torchvision.transforms import v2

    from raydali.train.models.normalized import IMAGENET_MEAN, IMAGENET_STD

    crop = v2.RandomResizedCrop(task.image_size, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()
    if not task.normalised:
        return _data_loader(task, *crop)
    to_floats = v2.ToDtype(getattr(torch, task.pixels), scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    return _data_loader(task, *crop, *to_floats)


def _torchvision_resize(task: Task) -> Deliveries:
    from torchvision.transforms import v2

    return _data_loader(task, v2.Resize([task.image_size, task.image_size], antialias=True), v2.PILToTensor())


def _data_loader(task: Task, *transforms: Any) -> Deliveries:
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision.datasets import ImageFolder as Folder
    from torchvision.transforms import v2

    images = Folder(task.root, v2.Compose(transforms))
    loader = DataLoader(
        images,
        batch_size=task.batch_size,
        # One long epoch: between two of them the workers would stand still.
        sampler=RandomSampler(images, num_samples=len(images) * EPOCHS),
        num_workers=task.workers,
        multiprocessing_context="fork",  # what users get; processes that were spawned themselves would spawn
        persistent_workers=True,
        pin_memory=task.gpu,
        drop_last=True,
    )
    for batch in loader:
        yield [tensor.to(task.device, non_blocking=True) for tensor in batch]


def _spdl(task: Task) -> Deliveries:
    import numpy as np
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder

    from raydali.data.tasks.random_crops import crop_windows
    from raydali.train.models.normalized import Normalized

    if task.gpu:
        torch.cuda.set_device(task.device)
    source, drawn = ImageFolder.scan(task.root), TrainImages(seed=0, image_size=task.image_size)
    normalise, dtype = Normalized(torch.nn.Identity()).to(task.device), getattr(torch, task.pixels)
    memory = torch.cuda.caching_allocator_alloc, torch.cuda.caching_allocator_delete
    to_device: Any = spdl.io.cuda_config(device_index=task.rank, allocator=memory) if task.gpu else None

    def images() -> Generator[list[Any], None, None]:
        order = endless(len(source), task.batch_size, task.world_size)
        for micro_batch in order.micro_batches(task.rank, task.world_size):
            draws, flips = drawn.draws(micro_batch.ids, micro_batch.epochs)
            paths = [source.path(id) for id in micro_batch.ids.tolist()]
            yield list(zip(paths, draws[:, None], flips.tolist(), strict=True))

    def decode(image: Any) -> Any:
        path, draws, flip = image
        packets = spdl.io.demux_image(path)
        shapes = np.array([[packets.height, packets.width]])
        (start,), (size,) = crop_windows(shapes, draws, drawn.random_aspect)
        (y, x), (height, width) = start.tolist(), size.tolist()
        side = f"{task.image_size}:{task.image_size}:flags=bilinear"
        steps = [f"crop={width}:{height}:{x}:{y}:exact=1", f"scale={side}", *["hflip"] * flip, "format=pix_fmts=rgb24"]
        return spdl.io.decode_packets(packets, filter_desc=",".join(steps))

    def batch(frames: list[Any]) -> Any:
        buffer = spdl.io.convert_frames(frames)
        if to_device is not None:
            buffer = spdl.io.transfer_buffer(buffer, device_config=to_device)
        pixels = spdl.io.to_torch(buffer).permute(0, 3, 1, 2)
        return normalise(pixels).to(dtype) if task.normalised else pixels

    decode(next(images())[0])  # says so at once where SPDL finds no FFmpeg
    pipeline = (
        PipelineBuilder()
        .add_source(images())
        .disaggregate()
        .pipe(decode, concurrency=task.threads)
        .aggregate(task.batch_size)
        .pipe(batch)
        .add_sink(2)
        .build(num_threads=task.threads + 1, max_failures=0)
    )
    with pipeline.auto_stop():
        yield from pipeline


LOADERS = {
    "raydali": Measured(deliver=_raydali, all_queues=True),
    "native": Measured(deliver=_native),
    "torchvision": Measured(deliver=_torchvision, parallel=True),
    "spdl": Measured(deliver=_spdl, module="spdl"),
    "synthetic": Measured(deliver=_synthetic),
    # Whole images resized, as in published_baseline.py.
    "raydali-resize": Measured(deliver=_raydali_resize, all_queues=True),
    "torchvision-resize": Measured(deliver=_torchvision_resize, parallel=True),
}
