"""Mixup and CutMix of torchvision, which mix the images and the labels of a micro-batch."""

from collections.abc import Callable

import torch

Mix = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def mixing(mixup: float, cutmix: float, classes: int) -> Mix:
    """Return a function that mixes 8-bit images and labels (N,) to float images and class shares (N, classes).

    Args:
        mixup: alpha of mixup (Zhang et al., ICLR 2018), 0 for off.
        cutmix: alpha of CutMix (Yun et al., ICCV 2019), 0 for off. With both off, nothing changes.
        classes: number of classes.
    """
    if not mixup and not cutmix:
        return lambda images, labels: (images, labels)
    from torchvision.transforms import v2  # takes seconds

    mixes = [v2.MixUp(alpha=mixup, num_classes=classes)] if mixup else []
    mixes += [v2.CutMix(alpha=cutmix, num_classes=classes)] if cutmix else []
    mix = v2.RandomChoice(mixes)
    return lambda images, labels: mix(images.float(), labels)
