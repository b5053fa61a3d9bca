"""Models by name: torchvision's, which takes seconds to import, and `digits`, a small network for the built-in data."""

import difflib
from collections.abc import Sequence
from importlib.metadata import version

from torch import nn

from raydali.errors import UsageError


def check_model(name: str) -> None:
    """Refuse a name that is no classification model's.

    Raises:
        UsageError: naming models that resemble it.
    """
    import torchvision

    check_known(name, ["digits", *torchvision.models.list_models(module=torchvision.models)], "resnet50")


def check_known(name: str, known: Sequence[str], usual: str) -> None:
    """Refuse a name that is none of the known.

    Args:
        usual: what to try where nothing resembles it.

    Raises:
        UsageError: naming models that resemble it.
    """
    if name not in known:
        near = ", ".join(difflib.get_close_matches(name, known, n=3, cutoff=0.4)) or usual
        raise UsageError(f"--model {name} is not a model of torchvision {version('torchvision')}: try {near}")


def build_model(name: str, classes: int) -> nn.Module:
    """The model, randomly initialised, with `classes` outputs."""
    if name == "digits":
        return digits_network(classes)
    import torchvision

    # GoogLeNet and Inception train with further outputs unless told not to.
    options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
    return model


def digits_network(classes: int) -> nn.Sequential:
    """Three convolutions with BatchNorm, 94,000 parameters for 10 classes: seconds an epoch on one core."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    layers = block(3, 32) + block(32, 64) + block(64, 128)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, classes))
