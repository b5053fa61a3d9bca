"""Whole images, as predictions of networks that take any size need them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.files import Files
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline
from raydali.data.tasks.settings import DecoderSettings

if TYPE_CHECKING:
    import torch
    from nvidia.dali.data_node import DataNode


@dataclass(frozen=True, kw_only=True)
class WholeImages(Pipeline[Files], DecoderSettings):
    """Whole images, without their targets; a batch has one, since sizes differ."""

    image_files: ClassVar[int] = 1

    @property
    def outputs(self) -> tuple[str, ...]:
        """The name of images (3, H, W) uint8."""
        return ("inputs",)

    def inputs(self, source: Files, ids: NDArray[np.int64], epochs: NDArray[np.int64]) -> Inputs:
        """Return the files."""
        return (source.files(ids),)

    def graph(self, source: Files, *inputs: "DataNode", device: Device) -> tuple["DataNode", ...]:
        """Decode the images."""
        from nvidia.dali import fn

        return (fn.decoders.image(inputs[0], **self.decoder_options(device)),)

    def sample(self, source: Files, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """Return an image, decoded by Pillow."""
        from torchvision.transforms.v2 import functional as F

        from raydali.data.tasks.pillow import decoded

        return (F.pil_to_tensor(decoded(source.read(id))),)
