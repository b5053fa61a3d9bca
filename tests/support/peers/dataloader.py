"""PyTorch's DataLoader with torchvision's transforms: Pillow in worker processes."""

# https://docs.pytorch.org/vision/stable/transforms.html, section "Performance considerations". For S3, torchdata's
# S3FileLoader names https://github.com/awslabs/s3-connector-for-pytorch as its successor.
import os
from collections.abc import Sequence
from operator import methodcaller
from typing import Any

from tests.support.peers import Batches, Setup, crops, deliver, images_of, picture, read

NAME = "PyTorch DataLoader"
PACKAGE = DISTRIBUTION = "torchvision"
PASSES = 1 << 20


class Images:
    """A dataset as torchvision's ImageFolder, which also reads objects of S3."""

    def __init__(self, setup: Setup) -> None:
        self.images, self.transform = images_of(setup.images), crops(setup.image_size)
        self.objects = objects([path for path, _ in self.images]) if setup.remote else None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.images[index]
        return self.transform(picture(self.objects[index] if self.objects else read(path))), label


def objects(uris: list[str]) -> Sequence[bytes]:
    """Return the S3 connector's dataset of the bytes of objects."""
    from s3torchconnector import S3ClientConfig, S3MapDataset  # type: ignore[import-not-found]

    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    dataset: Sequence[bytes] = S3MapDataset.from_objects(
        uris,
        region=os.environ.get("AWS_DEFAULT_REGION", "us-east-1"),
        endpoint=endpoint,
        transform=methodcaller("read"),
        s3client_config=S3ClientConfig(force_path_style=endpoint is not None),
    )
    return dataset


def loader_of(dataset: Any, setup: Setup, **options: Any) -> Any:
    """Make a DataLoader with worker processes."""
    from torch.utils.data import DataLoader

    return DataLoader(
        dataset,
        batch_size=setup.batch_size,
        num_workers=setup.threads,
        persistent_workers=True,
        pin_memory=setup.device != "cpu",
        drop_last=True,
        **options,
    )


def batches(setup: Setup) -> Batches:
    from torch.utils.data import RandomSampler

    dataset: Any = Images(setup)
    # One long pass: between passes, workers would be idle.
    sampler = RandomSampler(dataset, num_samples=len(dataset) * PASSES)
    return deliver(loader_of(dataset, setup, sampler=sampler), setup.device)
