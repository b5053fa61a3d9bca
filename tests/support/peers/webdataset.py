"""WebDataset: tar shards, which worker processes read from one end to the other."""

# https://github.com/webdataset/webdataset, README, "The webdataset Pipeline API". Batches are made by the workers, as
# there: unbatching in the main process, as in examples/train-resnet50-wds.ipynb, costs another millisecond per image.
import os
from pathlib import Path
from typing import Any

from tests.support.peers import Batches, Setup, crops, deliver, images_of, keys, read, s3, split

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
    if not setup.remote:
        return [str(path) for path in sorted(Path(setup.images).glob("*.tar"))]
    get = [{"Bucket": split(setup.images)[0], "Key": key} for key in keys(setup.images)]
    client = s3(os.getpid())
    return [client.generate_presigned_url("get_object", Params=each, ExpiresIn=86400) for each in get]


def batches(setup: Setup) -> Batches:
    import webdataset

    transform = crops(setup.image_size)

    def sample(item: dict[str, Any]) -> tuple[Any, int]:
        return transform(item["jpg"]), item["cls"]

    dataset = webdataset.WebDataset(shards(setup), resampled=True, shardshuffle=False)
    dataset = dataset.shuffle(1000).decode("pil").map(sample).batched(setup.batch_size, partial=False)
    loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=setup.threads, pin_memory=setup.device != "cpu")
    return deliver(loader, setup.device)
