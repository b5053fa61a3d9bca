"""Whole images resized to a square and normalised, nothing random: the plainest work that loaders are compared by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.classification import Images
from raydali.data.labeled_files import LabeledFiles
from raydali.data.pipeline import Device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ResizedImages:
    """A `raydali.data.pipeline.Pipeline` of images in float32, on GPUs too.

    Args:
        image_size: height and width of what comes out, pixels; aspect ratios are not kept.
    """

    image_size: int

    @property
    def outputs(self) -> tuple[str, ...]:
        """images (N, image_size, image_size, 3) and labels (N,) int64."""
        return "images", "labels"

    def inputs(
        self, source: LabeledFiles, ids: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[Sequence[NDArray[Any]] | NDArray[Any], ...]:
        """Files and labels (N,) int64."""
        return source.files(ids), source.labels[ids]

    def graph(self, source: LabeledFiles, *inputs: Any, device: Device) -> tuple[Any, ...]:
        """Reads, decodes, resizes with antialiasing, normalises."""
        from nvidia.dali import fn, types

        files, labels = inputs
        decoder = (
            {"device": "cpu"} if device == "cpu" else {"device": "mixed", "hw_decoder_load": Images.hw_decoder_load}
        )
        images = fn.decoders.image(fn.io.file.read(files) if source.dali_reads else files, **decoder)
        images = fn.crop_mirror_normalize(
            fn.resize(images, size=(self.image_size, self.image_size)),
            mean=[255 * m for m in Images.mean],
            std=[255 * s for s in Images.std],
            dtype=types.DALIDataType.FLOAT,
            output_layout="HWC",
        )
        return images, labels.gpu() if device == "gpu" else labels

    def sample(self, source: LabeledFiles, id: int, epoch: int) -> tuple["torch.Tensor", ...]:
        """The same by Pillow and torchvision: image (3, image_size, image_size) float32, label."""
        import io

        import torch
        from PIL import Image
        from torchvision.transforms.v2 import functional as F

        image = Image.open(io.BytesIO(source.read(id))).convert("RGB")
        pixels = F.to_dtype(F.pil_to_tensor(F.resize(image, [self.image_size] * 2)), torch.float32, scale=True)
        return F.normalize(pixels, list(Images.mean), list(Images.std)), torch.tensor(source.labels[id])
