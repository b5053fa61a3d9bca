"""LitData without conversion: files or objects as they are, read at once for a batch."""

# https://github.com/Lightning-AI/litData, README, "Stream raw files as-is"
from functools import partial
from typing import Any

from tests.support.peers import Batches, Setup, crops, deliver, images_of, picture
from tests.support.peers.dataloader import PASSES, loader_of
from tests.support.peers.litdata import allow_http

NAME = "LitData, raw files"
PACKAGE = DISTRIBUTION = "litdata"


def made(transform: Any, content: bytes) -> Any:
    return transform(picture(content))


def collate(labels: dict[str, int], items: list[tuple[Any, str]]) -> tuple[Any, Any]:
    import torch

    return torch.stack([image for image, _ in items]), torch.tensor([labels[path] for _, path in items])


def batches(setup: Setup) -> Batches:
    import torch
    from litdata import StreamingRawDataset
    from litdata.raw.indexer import FileIndexer

    allow_http()

    class Indexer(FileIndexer):  # type: ignore[misc]  # of a package without types
        def _upload_to_cloud(self, *_: Any) -> None:
            """Write no index into the folder of the images."""

    class Images(StreamingRawDataset):  # type: ignore[misc]  # of a package without types
        def __getitems__(self, indices: list[int]) -> list[tuple[Any, str]]:
            contents = super().__getitems__(indices)
            return [(content, self.items[index].path) for content, index in zip(contents, indices, strict=True)]

    transform = partial(made, crops(setup.image_size))
    dataset = Images(setup.images, cache_dir=setup.cache, transform=transform, indexer=Indexer())
    labels = dict(images_of(setup.images))
    sampler = torch.utils.data.RandomSampler(dataset, num_samples=len(dataset) * PASSES)
    return deliver(loader_of(dataset, setup, sampler=sampler, collate_fn=partial(collate, labels)), setup.device)
