"""Loaders of other projects on the same images: the scoreboard.

    python -m tests.support.peers --data ~/imagenet/train --json scoreboard.json --picture scoreboard.svg
    python -m tests.support.peers --data ~/imagenet/train --local-s3
    python -m tests.support.peers --data ~/imagenet/train --s3 s3://bucket/prefix --train

A file here sets one loader up as its authors advise; the comment at its top names the page. All deliver the same:
batches of random resized crops with flips, RGB in 8 bits, with labels, on the device; layouts differ. Each file has

    NAME            the name in tables
    PACKAGE         what is imported; a loader whose package is missing is listed as not installed
    DISTRIBUTION    the name of that package for pip
    batches(setup)  endless batches: (images, labels)

and, where they apply,

    prepare(folder, target, threads)  converts a folder of class folders; its time is reported, but not part of a rate
    NO_S3                             the reason why the loader is not measured from S3
    CACHES                            true if a second pass over objects of S3 reads copies on the local disk
    environment(workdir)              environment variables that its process needs from the start

Install the packages into a folder of their own, because some ask for older versions of what raydali uses:

    pip install --no-deps --target peers -r tests/support/peers/requirements.txt
    PYTHONPATH=peers python -m tests.support.peers ...
"""

import functools
import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = (
    "raydali",
    "dali",
    "dataloader",
    "spdl",
    "litdata",
    "litdata_raw",
    "mosaic",
    "webdataset",
    "grain",
    "ray_data",
)
EXTENSIONS = (".jpg", ".jpeg")
Batches = Iterator[tuple[Any, Any]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a loader delivers, and with what.

    Attributes:
        images: a local folder or an `s3://` URI: class folders of JPEGs, or what `prepare` made of them.
        cache: an empty local folder.
        threads: number of threads or of worker processes.
        device: "cpu", or "cuda:0".
    """

    images: str
    cache: str
    threads: int
    device: str
    batch_size: int = 256
    image_size: int = 224

    @property
    def remote(self) -> bool:
        return "://" in self.images


def images_of(root: str) -> list[tuple[str, int]]:
    """List the JPEGs of class folders, each with the index of its class."""
    if "://" in root:
        paths = [f"s3://{split(root)[0]}/{key}" for key in keys(root)]
    else:
        paths = [str(path) for path in Path(root).expanduser().glob("*/*")]
    paths = sorted(path for path in paths if path.lower().endswith(EXTENSIONS))
    classes = {name: index for index, name in enumerate(sorted({path.split("/")[-2] for path in paths}))}
    return [(path, classes[path.split("/")[-2]]) for path in paths]


def read(path: str) -> bytes:
    """Read a local file or an object of S3."""
    if "://" not in path:
        return Path(path).read_bytes()
    bucket, key = split(path)
    content: bytes = s3(os.getpid()).get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


def keys(uri: str) -> list[str]:
    """List the keys of the objects below an S3 URI."""
    bucket, prefix = split(uri)
    pages = s3(os.getpid()).get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/".lstrip("/"))
    return [each["Key"] for page in pages for each in page.get("Contents", ())]


def split(uri: str) -> tuple[str, str]:
    """Split an S3 URI into bucket and key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key.rstrip("/")


@functools.cache
def s3(_process: int) -> Any:
    """Return boto3's client of a process, whose connections its forks must not use."""
    import boto3
    from botocore.config import Config

    return boto3.client("s3", config=Config(max_pool_connections=64))


def crops(size: int, *, of_tensors: bool = False) -> Any:
    """Return torchvision's random crop and flip of a picture of Pillow, or of a tensor, in 8 bits."""
    from torchvision.transforms import v2

    made = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    return v2.Compose(made if of_tensors else [*made, v2.PILToTensor()])


def picture(content: bytes) -> Any:
    """Open a JPEG with Pillow."""
    from io import BytesIO

    from PIL import Image

    return Image.open(BytesIO(content)).convert("RGB")


def shuffled(items: list[Any]) -> Iterator[Any]:
    """Yield the items again and again, each time in another order."""
    while True:
        yield from random.sample(items, len(items))


def deliver(loader: Iterable[Any], device: str) -> Batches:
    """Yield the batches of a loader on the device, for endless passes."""
    while True:
        for images, labels in loader:
            yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
