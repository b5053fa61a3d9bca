"""Makes the network that is exported: all that is between the 8-bit pixels of a file and the answer.

classification, multi-label   images (N, 3, H, W) --> resize, crop, normalise, model --> probabilities, logits
restoration                   images (N, 3, H, W) --> model --> restored, 8-bit images of the same size
segmentation                  images (N, 3, H, W) --> normalise, model --> scores of the classes of each pixel
any other network             images (N, 3, H, W), resized and cropped already --> network --> its outputs
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from raydali.data.tasks.classification import ValidationImages
from raydali.data.tasks.pipeline import Interpolation
from raydali.errors import UsageError
from raydali.host.facts import versions
from raydali.inference.task_results.classification import Classification, MultiLabel
from raydali.inference.task_results.segmentation import Segmentation
from raydali.inference.task_results.task_results import Restoration, TaskResults
from raydali.inference.trained_run import TrainedRun
from raydali.training.evaluation.restoration import in_8_bits
from raydali.training.models.normalized import Normalized

INPUT = "images"
Answer = Literal["class", "labels", "image", "scores", "values"]
"""The answer for an image: its most probable class, its labels, a restored image of 8 bits, the scores of its pixels,
or all outputs."""
TIE = 2**-13
"""Levels by which ties are raised: they are rounded up, as by torch's kernel, in whatever order floats are added."""


class CentreCrop(nn.Module):
    """The centre of images whose shorter side is resized: Resize and CenterCrop of torchvision, for Pillow's images.

    It is plain arithmetic, which every exporter takes, for images of any size:

        images (N, 3, H, W) --> columns of the crop --> rows of the crop --> (N, 3, side, side)
                           x (W, side)             (side, H) x

    Each of both steps is a product with a matrix of the filter's weights, which are computed from H and W alone. As by
    torch's kernel for 8-bit images, the filter is widened where images shrink (antialiasing), it is cut off at the
    border, and the result of each step is rounded to 8 bits. Only the crop is computed, however long the image is.
    docs/decisions/export-resize.md compares it with ONNX's own operator.

    Args:
        shorter_side: length of the resized shorter side, in pixels.
        side: height and width of the crop, at most that.
        interpolation: the filter.
    """

    def __init__(self, shorter_side: int, side: int, interpolation: Interpolation) -> None:
        super().__init__()
        self.shorter_side, self.side, self.interpolation = shorter_side, side, interpolation

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the crops (..., side, side) of images (..., H, W) in 0..255: float32, whole numbers in 0..255."""
        # As tensors, since a condition on the sizes would become one of the exported model.
        height, width = (torch.scalar_tensor(size, dtype=torch.int64) for size in images.shape[-2:])
        shorter = torch.minimum(height, width)
        columns = self._weights(width, torch.arange(images.shape[-1]), shorter)
        rows = self._weights(height, torch.arange(images.shape[-2]), shorter)
        return _in_8_bits(rows @ _in_8_bits(images.to(torch.float32) @ columns.T))

    def _weights(self, length: torch.Tensor, pixels: torch.Tensor, shorter: torch.Tensor) -> torch.Tensor:
        """Return the weights (side, length) of the pixels of a row or a column in each pixel of the crop."""
        resized = self.shorter_side * length // shorter
        margin = resized - self.side
        places = (margin + margin // 2 % 2) // 2 + torch.arange(self.side)  # half of it, rounded to even
        # Distances of the pixels' centres in units of the filter: whole numbers up to this division.
        distances = (2 * pixels + 1) * resized - (2 * places[:, None] + 1) * length
        x = (distances.to(torch.float32) / (2 * torch.maximum(length, resized)).to(torch.float32)).abs()
        if self.interpolation == "bilinear":
            weights = (1 - x).clamp(min=0)
        else:  # Keys' cubic convolution, with a = -0.5 as in Pillow
            near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
            weights = torch.where(x < 1, near, torch.where(x < 2, far, 0.0))
        return weights / weights.sum(1, keepdim=True)


def _in_8_bits(levels: torch.Tensor) -> torch.Tensor:
    return (levels + (0.5 + TIE)).floor().clamp(0, 255)


class ImageNetwork(nn.Module):
    """All that is between the 8-bit pixels of a file and its outputs.

    Args:
        network: of a job.
        outputs: the names of what `finish` returns.
        answer: what is compared in a proof.
        finish: makes the outputs of what the network returns.
        crop: applied to images before.
    """

    def __init__(
        self,
        network: nn.Module,
        outputs: tuple[str, ...],
        answer: Answer,
        finish: Callable[[Any], tuple[torch.Tensor, ...]],
        crop: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.network, self.outputs, self.answer, self.finish = network, outputs, answer, finish
        self.crop = crop or nn.Identity()

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs, each with a row for each image, of images (N, 3, H, W) uint8."""
        return self.finish(self.network(self.crop(images)))


def classifier(crop: nn.Module, network: nn.Module, *, several: bool) -> ImageNetwork:
    """Return a classifier of images of any size, whose outputs are probabilities and logits, each (N, C).

    Args:
        crop: resizes and crops images.
        network: normalises crops, and returns logits.
        several: whether an image may have several labels.
    """

    def finish(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return logits.sigmoid() if several else logits.softmax(1), logits

    return ImageNetwork(network, ("probabilities", "logits"), "labels" if several else "class", finish, crop)


def restorer(network: nn.Module) -> ImageNetwork:
    """Return a network that restores images of any size, uint8 to uint8, of one that returns them in 0..1."""
    return ImageNetwork(network, ("restored",), "image", lambda images: (in_8_bits(images),))


def plain(network: nn.Module, example: torch.Tensor) -> ImageNetwork:
    """Return a network of images as the job's validation pipeline makes them.

    Args:
        network: returns a tensor, or a mapping or a sequence of tensors, with a row for each image.
        example: an image (3, H, W), for which it is called once.

    Raises:
        UsageError: it returns something else.
    """

    def finish(outputs: Any) -> tuple[torch.Tensor, ...]:  # noqa: ANN401 (a job's)
        return (outputs,) if isinstance(outputs, torch.Tensor) else (*getattr(outputs, "values", lambda: outputs)(),)

    with torch.inference_mode():
        outputs = network(example[None]) if example.dtype == torch.uint8 and example.dim() == 3 else None
    named = {"output": outputs} if isinstance(outputs, torch.Tensor) else outputs
    if isinstance(named, list | tuple):
        named = {f"output_{place}": value for place, value in enumerate(named)}
    if not isinstance(named, Mapping) or not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise UsageError(
            "the network cannot be exported, since it takes something else than an image, or returns something else "
            "than tensors: change network(model, config)"
        )
    return ImageNetwork(network, tuple(named), "values", finish)


@dataclass(frozen=True)
class ExportedModel:
    """A model that can be exported.

    Attributes:
        network: takes images (N, 3, H, W) uint8.
        facts: what a user of the file needs to know; each value can be written as JSON.
        size: H and W, if the network may take images of one size alone; None: it takes any.
    """

    network: ImageNetwork
    facts: Mapping[str, Any]
    size: tuple[int, int] | None = None


def exported_model(run: TrainedRun, network: nn.Module, task_results: TaskResults) -> ExportedModel:
    """Put a network between 8-bit images and answers.

    Args:
        run: the trained run.
        network: the run's, see `TrainedRun.network`; on the CPU.
        task_results: its task; the first one of the samples shows what the job's validation pipeline makes.

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
    if isinstance(task_results, Restoration):
        return ExportedModel(restorer(network), facts | {"output": "uint8 RGB images (N, 3, H, W)"})
    if isinstance(task_results, Segmentation):
        facts |= {
            "output": "scores (N, C, H, W) of classes",
            "classes": list(task_results.classes),
            **_normalisation(network),
        }
        scores = ImageNetwork(network, ("scores",), "scores", lambda scores: (scores,))
        return ExportedModel(scores.eval(), facts)
    if not isinstance(task_results, Classification) or type(run.pipeline) is not ValidationImages:
        example = run.pipeline.sample(task_results.source, 0, 0)[0]
        made = plain(network, example).eval()
        height, width = example.shape[-2:]
        facts["input"] = f"uint8 RGB images (N, 3, {height}, {width}), resized and cropped already"
        return ExportedModel(made, facts | {"output": ", ".join(made.outputs)}, (height, width))
    several = isinstance(task_results, MultiLabel)
    crop = CentreCrop(run.pipeline.shorter_side, run.pipeline.image_size, run.pipeline.interpolation)
    facts |= {
        "output": "probabilities (N, C) of labels, each from 0 to 1" if several else "probabilities (N, C) of classes",
        "classes": list(task_results.classes),
        "resize_size": crop.shorter_side,
        "image_size": crop.side,
        "interpolation": crop.interpolation,
        **_normalisation(network),
    }
    return ExportedModel(classifier(crop, network, several=several).eval(), facts)


def _normalisation(network: nn.Module) -> dict[str, list[float]]:
    """Return mean and deviation of each channel, in units of the full range; nothing of a network of the user's own."""
    if not isinstance(network, Normalized):
        return {}
    std = 1 / (255 * network.scale.double())
    mean = -network.shift.double() * std
    return {"mean": [round(value, 6) for value in mean.tolist()], "std": [round(value, 6) for value in std.tolist()]}
