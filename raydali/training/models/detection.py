"""Detectors by name: torchvision's, and `tiny`, a small network for the built-in data.

A detector gets a batch (N, 3, side, side) of 8-bit images, which it normalises. In training it also gets targets, and
returns losses by name. In evaluation it returns boxes, scores and labels of each image.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.fcos import FCOSHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.models.detection.rpn import RPNHead
from torchvision.models.detection.ssd import SSDHead
from torchvision.models.detection.ssdlite import SSDLiteHead
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from raydali.data.tasks.detection import PADDING
from raydali.training.checkpoint_file import map_tensors
from raydali.training.models.classification import check_known
from raydali.training.models.normalized import Normalized
from raydali.training.models.small_images import convolution

Targets = list[dict[str, torch.Tensor]]
Nested = Any
"""A tensor, or mappings and sequences of them."""

_STRIDE = 8
_HEADS_OF_ANCHORS = FCOSHead, RetinaNetHead, SSDHead, SSDLiteHead, RPNHead
_HEADS = *_HEADS_OF_ANCHORS, FastRCNNPredictor


def detection_loss(model: nn.Module) -> Callable[..., torch.Tensor]:
    """Return a function that sums the losses for images (N, 3, side, side), boxes (N, M, 4) and labels (N, M)."""

    def loss(images: torch.Tensor, boxes: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        counts = (labels != PADDING).sum(1).tolist()
        targets = [{"boxes": boxes[i, :count], "labels": labels[i, :count]} for i, count in enumerate(counts)]
        return torch.stack([*model(images, targets).values()]).sum()

    return loss


def constant_parts(model: nn.Module) -> list[nn.Module]:
    """Return the parts of a detector whose shapes do not depend on the objects: the backbone, and what follows it."""
    return [model.get_submodule("backbone"), *(part for part in model.modules() if isinstance(part, _HEADS_OF_ANCHORS))]


def check_detector(name: str) -> None:
    """Check that the name stands for a detector which needs only boxes for training.

    Raises:
        UsageError: it is not. The message suggests similar names.
    """
    models = torchvision.models.list_models(module=torchvision.models.detection)
    of_boxes = [model for model in models if not model.startswith(("maskrcnn", "keypointrcnn"))]
    check_known(name, ["tiny", *of_boxes], "fcos_resnet50_fpn")


def build_detector(name: str, classes: int) -> nn.Module:
    """Return the randomly initialised detector for labels 1..classes."""
    model: nn.Module
    if name == "tiny":
        model = tiny_detector(classes)
    else:
        build = torchvision.models.get_model_builder(name)
        model = build(weights=None, weights_backbone=None, num_classes=classes + 1)
    model.transform = _OneSize(model.transform)
    for module in model.modules():
        if isinstance(module, AnchorGenerator | DefaultBoxGenerator):
            module.register_forward_pre_hook(_anchors_in_full_precision)
        elif isinstance(module, _HEADS):
            module.register_forward_hook(_output_in_full_precision)
    return model


def tiny_detector(classes: int) -> FCOS:
    """Return torchvision's FCOS (Tian et al., ICCV 2019) on five convolutions and one level: 280,000 parameters."""
    widths = ((3, 16, 2), (16, 32, 2), (32, 64, 2), (64, 64, 1), (64, 64, 1))
    layers = (layer for inputs, outputs, stride in widths for layer in convolution(inputs, outputs, stride=stride))
    backbone = nn.Sequential(*layers)
    backbone.out_channels = 64  # type: ignore[assignment]  # FCOS reads it
    return FCOS(
        backbone,
        classes + 1,
        anchor_generator=AnchorGenerator(((_STRIDE,),), ((1.0,),)),
        head=FCOSHead(64, 1, classes + 1, num_convs=2),
        score_thresh=0.05,
    )


class DetectorNetwork(nn.Module):
    """A detector of torchvision, whose outputs before any threshold or selection can be computed, too.

    Args:
        model: the detector, made by `build_detector`. Its state in checkpoints is its own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, targets: Targets | None = None) -> Nested:
        """Return losses by name in training, else boxes, scores and labels of each image."""
        return self.model(images, targets)

    def raw_outputs(self, images: torch.Tensor) -> Nested:
        """Return what the heads compute; a second stage computes it for the whole image, which no selection finds."""
        model: Any = self.model
        padded, _ = model.transform(images)
        features = model.backbone(padded.tensors)
        maps = features if isinstance(features, Mapping) else {"0": features}
        if not hasattr(model, "rpn"):
            return model.head([*maps.values()])
        (height, width), heads = padded.image_sizes[0], model.roi_heads
        whole = [images.new_tensor([[0, 0, width, height]], dtype=torch.float32)] * len(images)
        boxes = heads.box_predictor(heads.box_head(heads.box_roi_pool(maps, whole, padded.image_sizes)))
        return model.rpn.head([*maps.values()]), boxes


class _OneSize(nn.Module):
    """A transform for detectors that normalises and pads images, but does not resize them.

    Args:
        own: the detector's own transform, from which mean, deviation and the divisor of sides are taken.
    """

    def __init__(self, own: GeneralizedRCNNTransform) -> None:
        super().__init__()
        self.normalized = Normalized(nn.Identity(), tuple(own.image_mean), tuple(own.image_std))
        self.multiple: int = own.size_divisible

    def forward(self, images: torch.Tensor, targets: Targets | None = None) -> tuple[ImageList, Targets | None]:
        height, width = images.shape[-2:]
        padded = F.pad(self.normalized(images), (0, -width % self.multiple, 0, -height % self.multiple))
        return ImageList(padded, [(height, width)] * len(images)), targets

    def postprocess(self, detections: Targets, *_: object) -> Targets:
        return detections


# Autocast returns 16-bit floats, in which coordinates above 256 are rounded to multiples of 2, 4 or 8 pixels.


def _anchors_in_full_precision(_: nn.Module, inputs: tuple[Any, list[torch.Tensor]]) -> tuple[Any, list[torch.Tensor]]:
    """Convert the feature maps: anchors get their dtype, and otherwise depend only on their shape."""
    images, maps = inputs
    return images, [_full(features[:1, :1]) for features in maps]


def _output_in_full_precision(_: nn.Module, __: object, output: Nested) -> Nested:
    return map_tensors(output, _full)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
