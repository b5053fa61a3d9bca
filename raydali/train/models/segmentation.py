"""Segmentation models of torchvision as networks that return one tensor."""

import torch
from torch import nn


class Scores(nn.Module):
    """Returns the scores (N, classes, H, W) out of the mapping that a segmentation model of torchvision returns.

    Args:
        model: the model. Its state in checkpoints is its own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores for normalised images (N, 3, H, W)."""
        scores: torch.Tensor = self.model(images)["out"]
        return scores
