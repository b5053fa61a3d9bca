"""LitData: chunks of 64 MB, which worker processes read, from S3 by way of the local disk."""

# https://github.com/Lightning-AI/litData, README, "Optimize images as JPEG" and benchmarks/litdata/stream_imagenet.py
from typing import Any

from tests.support.peers import Batches, Setup, crops, deliver, images_of

NAME = "LitData"
PACKAGE = DISTRIBUTION = "litdata"
CACHES = True
IMAGES_OF_CHUNK = 512
"""About 64 MB, and whole batches: workers are given whole batches."""


def item(image: tuple[str, int]) -> dict[str, Any]:
    from litdata import Image

    return {"image": Image(path=image[0]), "label": image[1]}


def prepare(folder: str, target: str, threads: int) -> None:
    import litdata

    images = images_of(folder)
    # No chunk is to have images of two workers: LitData 0.2.76 reads all of such a chunk for each of its images. In a
    # large data set this happens to few chunks, but to the first one of every worker, which is what is measured.
    chunks = max(1, len(images) // threads // IMAGES_OF_CHUNK)
    size = max(1, min(IMAGES_OF_CHUNK, len(images) // threads))
    images = images[: threads * chunks * size]
    litdata.optimize(item, images, target, chunk_size=size, num_workers=threads, verbose=False)


def allow_http() -> None:
    """Let LitData read from an endpoint without TLS, for which it has no option."""
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True


def batches(setup: Setup) -> Batches:
    from litdata import StreamingDataLoader, StreamingDataset

    allow_http()
    crop = crops(setup.image_size, of_tensors=True)

    def sample(item: dict[str, Any]) -> tuple[Any, int]:
        return crop(item["image"]), item["label"]

    dataset = StreamingDataset(setup.images, cache_dir=setup.cache, shuffle=True, drop_last=True, transform=sample)
    loader = StreamingDataLoader(
        dataset,
        batch_size=setup.batch_size,
        num_workers=setup.threads,
        persistent_workers=True,
        pin_memory=setup.device != "cpu",
    )
    return deliver(loader, setup.device)
