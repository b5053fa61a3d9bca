"""Normalising inside the model is torchvision's normalising before it."""

import torch
from torch import nn
from torchvision.transforms.v2 import functional as F

from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD
from raydali.train.models.normalized import Normalized


def test_it_is_torchvisions() -> None:
    images = torch.randint(256, (2, 3, 5, 4), dtype=torch.uint8)
    expected = F.normalize(F.to_dtype(images, torch.float32, scale=True), list(IMAGENET_MEAN), list(IMAGENET_STD))
    torch.testing.assert_close(Normalized(nn.Identity())(images), expected)
    torch.testing.assert_close(Normalized(nn.Identity())(images.float()), expected)


def test_other_means_and_deviations_of_clips_with_one_channel() -> None:
    clips = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 3, 1, 1)
    normalized = Normalized(nn.Identity(), mean=(0.2,), std=(0.5,))(clips)
    torch.testing.assert_close(normalized.flatten(), torch.tensor([-0.4, 0.0, 1.6]))


def test_a_checkpoint_holds_the_models_state_alone() -> None:
    model = nn.Conv2d(3, 4, 1)
    assert Normalized(model).state_dict().keys() == {f"model.{name}" for name in model.state_dict()}
