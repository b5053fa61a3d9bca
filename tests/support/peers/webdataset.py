"""WebDataset: tar shards, which worker processes read from one end to the other."""

# https://github.com/webdataset/webdataset, examples/train-resnet50-wds.ipynb
from typing import Any

from tests.support.peers import Batches, Setup, crops, deliver, images_of, read

NAME = "WebDataset"
PACKAGE = DISTRIBUTION = "webdataset"
SHARD = 64
"""Images per shard: every worker needs a shard of its own, however few images there are."""


def prepare(folder: str, target: str, threads: int) -> None:
    import webdataset

    with webdataset.ShardWriter(f"{target}/%06d.tar", maxcount=SHARD, verbose=0) as writer:
        for number, (path, label) in enumerate(images_of(folder)):
            writer.write({"__key__": f"{number:08d}", "jpg": read(path), "cls": label})


def shards(setup: Setup) -> list[str]:
    """Return the shards' paths; those of S3 as URLs, which WebDataset reads by curl."""
    import os
    from pathlib import Path

    from tests.support.peers import s3, split

    if not setup.remote:
        return [str(path) for path in sorted(Path(setup.images).glob("*.tar"))]
    bucket, prefix = split(setup.images)
    client = s3(os.getpid())
    listing = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    keys = [each["Key"] for page in listing for each in page["Contents"]]
    get = [{"Bucket": bucket, "Key": key} for key in keys]
    return [client.generate_presigned_url("get_object", Params=each, ExpiresIn=86400) for each in get]


def batches(setup: Setup) -> Batches:
    import webdataset

    transform = crops(setup.image_size)

    def sample(item: dict[str, Any]) -> tuple[Any, int]:
        return transform(item["jpg"]), item["cls"]

    dataset = webdataset.WebDataset(shards(setup), resampled=True, shardshuffle=False)
    dataset = dataset.shuffle(1000).decode("pil").map(sample).batched(64)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=setup.threads, pin_memory=setup.device != "cpu")
    return deliver(loader.unbatched().shuffle(10).batched(setup.batch_size), setup.device)
