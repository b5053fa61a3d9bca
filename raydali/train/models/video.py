"""Video classification models by name: those of torchvision, and `clips`, a small network for the built-in data."""

from functools import partial

import torchvision
from torch import nn

from raydali.errors import UsageError
from raydali.train.models.classification import check_known, why_unfit


def check_video_model(name: str, sequence_length: int, image_size: int) -> None:
    """Check that the name is a video model's, and that the model accepts clips of this size.

    Raises:
        UsageError: it is not. The message suggests similar names, or says why the size is not accepted.
    """
    check_known(name, ["clips", *torchvision.models.list_models(module=torchvision.models.video)], "r2plus1d_18")
    if why := why_unfit(partial(build_video_model, name, 2), 3, sequence_length, image_size, image_size):
        raise UsageError(
            f"--model {name} cannot take clips of {sequence_length} frames of {image_size}x{image_size} pixels "
            f"({why}): try --sequence-length 16 --image-size 224"
        )


def build_video_model(name: str, classes: int) -> nn.Module:
    """Return the randomly initialised model of clips (N, 3, frames, height, width), with `classes` outputs."""
    if name == "clips":
        return clips_network(classes)
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    return model


def clips_network(classes: int) -> nn.Sequential:
    """Return a network of three space-time convolutions: 71,000 parameters, and epochs of seconds on one core."""

    def block(inputs: int, outputs: int, stride: tuple[int, int, int]) -> list[nn.Module]:
        convolution = nn.Conv3d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm3d(outputs), nn.ReLU(inplace=True)]

    layers = block(3, 16, (1, 4, 4)) + block(16, 32, (1, 2, 2)) + block(32, 64, (2, 2, 2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(64, classes))
