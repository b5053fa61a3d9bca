"""DALI's own RandAugment, and some crops in grey: for a copy of jobs/imagenet.py, in place of raydali.TrainImages."""

from typing import Any, Literal

from nvidia.dali import fn
from nvidia.dali.auto_aug import rand_augment

from raydali import LabeledSource, Samples, TrainImages, uniforms


class RandAugmented(TrainImages):
    """A random crop, a flip, and two operations that DALI draws; some crops in grey, drawn from (seed, epoch, id)."""

    conditionals = True

    def inputs(self, source: LabeledSource, samples: Samples) -> tuple[Any, ...]:
        """Return the crops, and whether a sample is grey; + 1, or the number would be a crop's."""
        grey = uniforms(1, self.seed + 1, samples.keys, samples.ids)[:, 0] < 0.2
        return *super().inputs(source, samples), grey

    def graph(self, source: LabeledSource, *inputs: Any, device: Literal["cpu", "gpu"]) -> tuple[Any, ...]:
        """Return the outputs of TrainImages, augmented on the device."""
        images, labels = super().graph(source, *inputs[:-1], device=device)
        if inputs[-1]:
            images = fn.saturation(images, saturation=0)
        return rand_augment.rand_augment(images, n=2, m=9), labels
