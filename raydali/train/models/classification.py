"""Classification models by name: those of torchvision, and `digits`, a small network for the built-in data."""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

import torch
from torch import nn

from raydali.errors import UsageError

SIZES_TRIED = 28, 32, 64, 96, 112, 128, 160, 192, 224, 256, 299, 384
"""Image sizes that are tried, to suggest one that a model accepts."""


def check_model(name: str, image_size: int = 224) -> None:
    """Check that the name is a classification model's, and that the model accepts images of this size.

    Raises:
        UsageError: it is not. The message suggests similar names, or a size that the model accepts.
    """
    import torchvision

    check_known(name, ["digits", *torchvision.models.list_models(module=torchvision.models)], "resnet50")
    if why := _unfit(name, image_size):
        nearest = sorted(SIZES_TRIED, key=lambda size: abs(size - image_size))
        fit = next((f"--image-size {size}" for size in nearest if not _unfit(name, size)), "another --model")
        raise UsageError(f"--model {name} cannot take images of {image_size}x{image_size} pixels ({why}): try {fit}")


def _unfit(name: str, size: int) -> str:
    return why_unfit(partial(build_model, name, 2, size), 3, size, size)


def why_unfit(build: Callable[[], nn.Module], *shape: int) -> str:
    """Return why a model refuses inputs of this shape, in one line; empty if it accepts them or cannot be tried."""
    with torch.device("meta"), torch.no_grad():  # computes only shapes, without memory
        try:
            build().eval()(torch.empty(1, *shape))
        except NotImplementedError:  # RegNet reads its initial weights
            return ""
        except (RuntimeError, AssertionError, ValueError) as error:
            return " ".join(str(error).split()).partition(". ")[0][:80]
    return ""


def has_one_size(name: str) -> bool:
    """Return whether the model has weights for each position in an image, and so accepts images of only one size."""
    return name.startswith(("vit_", "maxvit_"))


def check_known(name: str, known: Sequence[str], usual: str) -> None:
    """Check that a name is known.

    Raises:
        UsageError: it is not. The message suggests similar names, or `usual` if there are none.
    """
    if name not in known:
        longer = sorted(other for other in known if other.startswith(name))[:3]
        near = ", ".join(longer or difflib.get_close_matches(name, known, n=3, cutoff=0.4)) or usual
        raise UsageError(f"--model {name} is not a model of torchvision {version('torchvision')}: try {near}")


def build_model(name: str, classes: int, image_size: int = 224) -> nn.Module:
    """Return the randomly initialised model with `classes` outputs, for square images of this size in pixels."""
    if name == "digits":
        return digits_network(classes)
    import torchvision

    options: dict[str, object] = {}
    if name in ("googlenet", "inception_v3"):  # by default they have auxiliary outputs in training
        options = {"aux_logits": False, "init_weights": True}
    elif has_one_size(name):
        options = {"image_size": image_size} if name.startswith("vit_") else {"input_size": (image_size, image_size)}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
    return model


def digits_network(classes: int) -> nn.Sequential:
    """Return a network of three convolutions with BatchNorm: 94,000 parameters, and epochs of seconds on one core."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    layers = block(3, 32) + block(32, 64) + block(64, 128)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))
