"""A pipeline that resizes whole images to a square without random steps, for simple comparisons of loaders."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.labeled import LabeledFiles
from raydali.data.tasks.classification import Images
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ResizedImages(Pipeline[LabeledFiles]):
    """A pipeline of resized images in 8 bits, on CPUs and GPUs.

    Args:
        image_size: height and width of the output, pixels; aspect ratios are not kept.
    """

    image_size: int

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of images (N, image_size, image_size, 3) uint8 and labels (N,) int64."""
        return "images", "labels"

    def inputs(self, source: LabeledFiles, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Inputs:
        """Return files and labels (N,) int64."""
        return source.files(ids), source.labels[ids]

    def graph(self, source: LabeledFiles, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Read and decode images, and resize them with antialiasing."""
        from nvidia.dali import fn

        from raydali.data.tasks.dali_ops import decoder_options

        files, labels = inputs
        contents = fn.io.file.read(files) if source.dali_reads else files
        images = fn.decoders.image(contents, **decoder_options(device, Images.hw_decoder_load))
        images = fn.resize(images, size=(self.image_size, self.image_size))
        return images, labels.gpu() if device == "gpu" else labels

    def sample(self, source: LabeledFiles, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return the same, made by Pillow and torchvision: image (3, image_size, image_size) uint8, label."""
        import torch
        from torchvision.transforms.v2 import functional as F

        from raydali.data.tasks.pillow import decoded

        image = F.resize(decoded(source.read(id)), [self.image_size] * 2)
        return F.pil_to_tensor(image), torch.tensor(source.labels[id])
