"""Stochastic depth: training leaves out residual branches at random, the later ones more often."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, Bottleneck
from torchvision.ops import StochasticDepth, stochastic_depth


def set_drop_path(model: nn.Module, probability: float) -> bool:
    """Set the probability that a sample skips the last residual branch; return whether the model has such branches.

    It rises linearly over the blocks (Huang et al., "Deep Networks with Stochastic Depth", ECCV 2016). Where a model
    has layers of torchvision's StochasticDepth, such as ConvNeXt, EfficientNet and Swin, the proportions stay as its
    own, if they are not all 0. ResNets of torchvision have none: there, too, it rises from 0 in the first block, as in
    timm's, and parameters keep their names.

    Args:
        model: a model of torchvision, or one of its layers.
        probability: of the last branch, 0 to 1.
    """
    depths = [module for module in model.modules() if isinstance(module, StochasticDepth)]
    largest = max((depth.p for depth in depths), default=0.0)
    for index, depth in enumerate(depths):
        depth.p = probability * (depth.p / largest if largest else index / max(1, len(depths) - 1))
    blocks = [module for module in model.modules() if isinstance(module, BasicBlock | Bottleneck)]
    for index, block in enumerate(blocks):
        last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        last.register_forward_hook(partial(_drop, probability=probability * index / max(1, len(blocks) - 1)))
    return bool(depths or blocks)


def _drop(norm: nn.Module, _inputs: Any, branch: torch.Tensor, *, probability: float) -> torch.Tensor:  # noqa: ANN401
    """Leave out the output of a branch for some samples, after the branch's last norm."""
    kept: torch.Tensor = stochastic_depth(branch, probability, "row", norm.training)
    return kept
