"""The network that is exported: all that is between the 8-bit pixels of a file and the answer.

classification, multi-label   images (N, 3, H, W) --> resize, crop, normalise, model --> probabilities, logits
restoration                   images (N, 3, H, W) --> model --> restored, 8-bit images of the same size
any other network             images (N, 3, H, W), resized and cropped already --> network --> its outputs
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from raydali.data.sources.source import Source
from raydali.data.tasks.classification import ValidationImages
from raydali.errors import UsageError
from raydali.host.facts import versions
from raydali.inference.export.centre_crop import CentreCrop
from raydali.inference.kinds.classification import Classification
from raydali.inference.kinds.multi_label import MultiLabel
from raydali.inference.kinds.restoration import Restoration
from raydali.inference.trained_run import TrainedRun
from raydali.train.evaluation.restoration import in_8_bits
from raydali.train.models.normalized import Normalized

INPUT = "images"


class ImageClassifier(nn.Module):
    """A classifier of images of any size.

    Args:
        crop: resizes and crops them.
        network: normalises crops, and returns logits (N, C).
        several: whether an image may have several labels.
    """

    outputs = "probabilities", "logits"

    def __init__(self, crop: nn.Module, network: nn.Module, *, several: bool) -> None:
        super().__init__()
        self.crop, self.network, self.several = crop, network, several

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return probabilities and logits, each (N, C), of images (N, 3, H, W) uint8."""
        logits = self.network(self.crop(images))
        return logits.sigmoid() if self.several else logits.softmax(1), logits


class ImageRestorer(nn.Module):
    """A network that restores images of any size, with 8 bits at both ends.

    Args:
        network: takes images in 0..255, and returns them in 0..1.
    """

    outputs = ("restored",)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor]:
        """Return restored images (N, 3, H, W) uint8 of images (N, 3, H, W) uint8."""
        return (in_8_bits(self.network(images)),)


class ImageNetwork(nn.Module):
    """A network of images as the job's validation pipeline makes them.

    Args:
        network: returns a tensor, or a mapping or a sequence of tensors, with a row for each image.
        example: an image (3, H, W), for which it is called once.

    Raises:
        UsageError: it does not.
    """

    def __init__(self, network: nn.Module, example: torch.Tensor) -> None:
        super().__init__()
        self.network, self.size = network, (example.shape[-2], example.shape[-1])
        with torch.inference_mode():
            found = network(example[None]) if example.dtype == torch.uint8 and example.dim() == 3 else None
        named = {"output": found} if isinstance(found, torch.Tensor) else found
        if isinstance(named, list | tuple):
            named = {f"output_{place}": value for place, value in enumerate(named)}
        if not isinstance(named, Mapping) or not all(isinstance(value, torch.Tensor) for value in named.values()):
            raise UsageError(
                "the network cannot be exported, since it takes something else than an image, or returns something "
                "else than tensors: change network(model, config)"
            )
        self.outputs = tuple(named)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs for images (N, 3, H, W) uint8."""
        found = self.network(images)
        return (found,) if isinstance(found, torch.Tensor) else (*getattr(found, "values", lambda: found)(),)


@dataclass(frozen=True)
class ExportedModel:
    """A model that can be exported.

    Attributes:
        network: takes images (N, 3, H, W) uint8; has "outputs", the names of what it returns.
        facts: what a user of the file needs to know; each value can be written as JSON.
        size: H and W, if the network may take images of one size alone; None: it takes any.
    """

    network: ImageClassifier | ImageRestorer | ImageNetwork
    facts: Mapping[str, Any]
    size: tuple[int, int] | None = None

    @property
    def texts(self) -> dict[str, str]:
        """The facts as text: strings as they are, all else as JSON."""
        return {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in self.facts.items()}


def exported_model(run: TrainedRun, network: nn.Module, classes: Sequence[str], source: Source) -> ExportedModel:
    """Put a network between 8-bit images and answers.

    Args:
        run: the trained run.
        network: the run's, see `TrainedRun.network`; on the CPU.
        classes: in the order of its outputs.
        source: samples, of which the first one shows what the job's validation pipeline makes.

    Raises:
        UsageError: it takes or returns something else.
    """
    facts: dict[str, Any] = {
        "raydali": versions().get("raydali"),
        "run": str(run.folder),
        "weights": run.weights.origin,
        "weights_sha256": run.weights.sha256,
        "model": getattr(run.config, "model", type(network).__name__),
        "input": "uint8 RGB images (N, 3, H, W), upright as EXIF says; all of a batch have one size",
    }
    if isinstance(run.kind, Restoration):
        return ExportedModel(ImageRestorer(network), facts | {"output": "uint8 RGB images (N, 3, H, W)"})
    if not isinstance(run.kind, Classification) or type(run.pipeline) is not ValidationImages:
        plain = ImageNetwork(network, run.pipeline.sample(source, 0, 0)[0]).eval()
        facts["input"] = f"uint8 RGB images (N, 3, {plain.size[0]}, {plain.size[1]}), resized and cropped already"
        return ExportedModel(plain, facts | {"output": ", ".join(plain.outputs)}, plain.size)
    several = isinstance(run.kind, MultiLabel)
    crop = CentreCrop(run.pipeline.shorter_side, run.pipeline.image_size, run.pipeline.interpolation)
    facts |= {
        "output": "probabilities (N, C) of labels, each from 0 to 1" if several else "probabilities (N, C) of classes",
        "classes": list(classes),
        "resize_size": crop.shorter_side,
        "image_size": crop.side,
        "interpolation": crop.interpolation,
        **_normalisation(network),
    }
    return ExportedModel(ImageClassifier(crop, network, several=several).eval(), facts)


def _normalisation(network: nn.Module) -> dict[str, list[float]]:
    """Return mean and deviation of each channel, in units of the full range; nothing of a network of the user's own."""
    if not isinstance(network, Normalized):
        return {}
    std = 1 / (255 * network.scale.double())
    mean = -network.shift.double() * std
    return {"mean": [round(value, 6) for value in mean.tolist()], "std": [round(value, 6) for value in std.tolist()]}
