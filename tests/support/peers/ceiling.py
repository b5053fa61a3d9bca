"""A batch that is already on the device: the limit of the training step."""

from tests.support.peers import Batches, Setup

NAME = "a batch on the device"
PACKAGE = DISTRIBUTION = "torch"


def batches(setup: Setup) -> Batches:
    import torch

    images = torch.randint(256, (setup.batch_size, setup.image_size, setup.image_size, 3), dtype=torch.uint8)
    batch = images.to(setup.device), torch.zeros(setup.batch_size, dtype=torch.int64, device=setup.device)
    while True:
        yield batch
