"""Mosaic Streaming: shards of MDS, which worker processes read, from S3 by way of the local disk."""

# https://docs.mosaicml.com/projects/streaming/en/stable/getting_started/quick_start.html and faqs_and_tips.html
import os
from typing import Any

from tests.support.peers import Batches, Setup, crops, deliver, images_of
from tests.support.peers.dataloader import loader_of

NAME = "Mosaic Streaming"
PACKAGE = "streaming"
DISTRIBUTION = "mosaicml-streaming"
CACHES = True


def prepare(folder: str, target: str, threads: int) -> None:
    from PIL import Image
    from streaming import MDSWriter

    with MDSWriter(out=target, columns={"image": "jpeg", "label": "int"}) as writer:
        for path, label in images_of(folder):
            with Image.open(path) as image:  # whose file is copied as it is
                writer.write({"image": image, "label": label})


def batches(setup: Setup) -> Batches:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    os.environ["S3_ENDPOINT_URL"] = os.environ.get("AWS_ENDPOINT_URL", "")
    clean_stale_shared_memory()
    transform = crops(setup.image_size)

    class Images(StreamingDataset):  # type: ignore[misc]  # of a package without types
        def __getitem__(self, index: Any) -> tuple[Any, int]:
            sample = super().__getitem__(index)
            return transform(sample["image"].convert("RGB")), sample["label"]

    where = {"remote": setup.images, "local": setup.cache} if setup.remote else {"local": setup.images}
    return deliver(loader_of(Images(**where, batch_size=setup.batch_size, shuffle=True), setup), setup.device)
