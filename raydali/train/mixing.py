"""Mixup and CutMix: images and labels of a micro-batch mixed with each other (torchvision's)."""

from collections.abc import Callable

import torch

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def mixing(mixup: float, cutmix: float, classes: int) -> Mix:
    """Return a function that mixes 8-bit images and labels (N,): float images and shares (N, classes).

    Args:
        mixup: alpha of mixup (Zhang et al., ICLR 2018), 0 for off.
        cutmix: alpha of CutMix (Yun et al., ICCV 2019), 0 for off; with both off nothing is changed.
        classes: number of classes.
    """
    if not mixup and not cutmix:
        return lambda images, labels: (images, labels)
    from torchvision.transforms import v2  # takes seconds

    mixes = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    mixes += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    mix = v2.RandomChoice(mixes)
    return lambda images, labels: mix(images.float(), labels)
