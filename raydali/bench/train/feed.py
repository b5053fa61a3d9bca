"""Batches for training: pairs of images and labels on the device, from each loader in its usual configuration."""

from collections.abc import Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raydali.bench.loader.contenders import LOADERS, Pixels, Task, our_loader
from raydali.data.sources.image_folder import ImageFolder
from raydali.data.tasks.classification import TrainImages

if TYPE_CHECKING:
    import torch

    from raydali.train.precision import Precision

Pair = tuple["torch.Tensor", "torch.Tensor"]


class BatchSource:
    """A loader, configured for training.

    Attributes:
        resident: a batch of noise with the shapes, dtypes, strides and device of its batches.
        batches: endless pairs of images (N, 3, size, size), channels last, and labels (N,) int64, on the device. The
            loader starts when the first one is requested.
        store: maximum number of batches that it prepares in advance.
    """

    def __init__(self, loading: Task, source: ImageFolder, precision: "Precision") -> None:
        import torch

        half = loading.gpu and precision.dtype != torch.float32
        # The other loaders deliver normalized floats, which autocast converts.
        formats: dict[str, Pixels] = {"native": "float16" if half else "float32", "torchvision": "float32"}
        pixels = formats.get(loading.loader, "uint8")
        synthetic = our_loader(loading, "synthetic", source, TrainImages(seed=0, image_size=loading.image_size))
        batch = synthetic.resident_batch(loading.batch_size)
        self.resident = batch["images"].to(getattr(torch, pixels)), batch["labels"]
        self.store = 2 * loading.workers if loading.loader == "torchvision" else 2
        if loading.loader == "raydali":
            from raydali.data.loading.dali_loader import PREFETCHED_BATCHES

            self.store = PREFETCHED_BATCHES
        pairs = {"native": _native, "torchvision": _torchvision}.get(loading.loader, _ours)
        self.batches = pairs(LOADERS[loading.loader].batches(replace(loading, pixels=pixels)))


def _ours(batches: Iterable[Any]) -> "Generator[Pair, None, None]":
    for batch in batches:
        yield batch["images"], batch["labels"]


def _native(batches: Iterable[Any]) -> "Generator[Pair, None, None]":
    """Yield batches like DALI's own iterator for PyTorch: the host waits for each batch."""
    from torch.utils.dlpack import from_dlpack

    for images, labels in batches:
        yield from_dlpack(images.as_tensor()).permute(0, 3, 1, 2), from_dlpack(labels.as_tensor()).squeeze(-1).long()


def _torchvision(batches: Iterable[Any]) -> "Generator[Pair, None, None]":
    import torch

    for images, labels in batches:
        yield images.contiguous(memory_format=torch.channels_last), labels
