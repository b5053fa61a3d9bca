"""The loaders as training takes them: pairs of images and labels on the device, each loader as its users have it."""

from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raydali.bench.loader.contenders import LOADERS, Task, endless
from raydali.data.sources.image_folder import ImageFolder
from raydali.data.tasks.classification import TrainImages

if TYPE_CHECKING:
    import torch

    from raydali.data.loading.loader import Loader
    from raydali.train.precision import Precision
    from raydali.train.worker import Worker

Pair = tuple["torch.Tensor", "torch.Tensor"]


class BatchSource:
    """A loader as its users would have it for training.

    Attributes:
        resident: a batch of noise like its batches: shapes, dtypes, strides and device.
        batches: endless pairs of images (N, 3, size, size), channels last, and labels (N,) int64, on the device.
            Nothing of the loader is at work before the first is asked for.
        store: batches that it may have made ahead of their being asked for.
    """

    def __init__(self, delivery: Task, source: ImageFolder, precision: "Precision", worker: "Worker") -> None:
        import torch

        pipeline = TrainImages(seed=0, image_size=delivery.image_size)
        order = endless(len(source), delivery.batch_size, delivery.world_size)
        half = delivery.gpu and precision.dtype != torch.float32
        # What the others hand out is normalised, and for autocast to convert.
        dtypes = {"native": torch.float16 if half else torch.float32, "torchvision": torch.float32}
        dtype = dtypes.get(delivery.loader, torch.uint8)

        def loader(name: Any) -> "Loader":
            from raydali.data.loading.make import make_loader

            return make_loader(
                name,
                source,
                pipeline,
                order,
                rank=delivery.rank,
                world_size=delivery.world_size,
                device=worker.device,
                threads=delivery.threads,
            )

        batch = loader("synthetic").resident_batch(delivery.batch_size)
        self.resident = batch["images"].to(dtype), batch["labels"]
        self.store = 2
        if delivery.loader == "native":
            self.batches = _native(replace(delivery, pixels="float16" if half else "float32"), dtype)
        elif delivery.loader == "torchvision":
            self.store = 2 * delivery.workers
            self.batches = _torchvision(replace(delivery, pixels="float32"))
        else:
            if delivery.loader == "raydali":
                from raydali.data.loading.dali_loader import PREFETCHED_BATCHES

                self.store = PREFETCHED_BATCHES
            self.batches = _ours(loader("dali" if delivery.loader == "raydali" else "synthetic"))


def _ours(loader: "Loader") -> "Generator[Pair, None, None]":
    with loader:
        for batch in loader:
            yield batch["images"], batch["labels"]


def _native(delivery: Task, dtype: "torch.dtype") -> "Generator[Pair, None, None]":
    """As DALI's own iterator for PyTorch does it: the host waits for the batch, which is then bound to the stream."""
    from torch.utils.dlpack import from_dlpack

    for images, labels in LOADERS["native"].deliver(delivery):
        pixels = from_dlpack(images.as_tensor()).permute(0, 3, 1, 2)
        yield pixels.to(dtype), from_dlpack(labels.as_tensor()).squeeze(-1).long()


def _torchvision(delivery: Task) -> "Generator[Pair, None, None]":
    import torch

    for images, labels in LOADERS["torchvision"].deliver(delivery):
        yield images.contiguous(memory_format=torch.channels_last), labels
