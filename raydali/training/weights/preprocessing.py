"""Finds the images that weights expect: mean, deviation, size and interpolation."""

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

from raydali.training.models.factories import is_timm, timm_settings

Three = tuple[float, float, float]
Interpolation = Literal["bilinear", "bicubic"]
_HALF: Three = (0.5, 0.5, 0.5)
_NORMALIZING = "googlenet", "inception_v3"


@dataclass(frozen=True)
class Preprocessing:
    """The images that weights expect; a value is None if it is not known.

    Attributes:
        mean: the mean of each channel, in units of the full range.
        std: the standard deviation of each channel, in the same units.
        image_size: height and width of the images of validation, in pixels.
        resize_size: length of the shorter side before the centre crop to image_size, in pixels.
        interpolation: the filter that images are resized by.
    """

    mean: Three | None = None
    std: Three | None = None
    image_size: int | None = None
    resize_size: int | None = None
    interpolation: Interpolation | None = None

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> "Preprocessing":
        """The preprocessing that the `model.json` of a run tells.

        Raises:
            ValueError, TypeError: it tells something else.
        """
        mean, std = (None if facts.get(key) is None else _three(facts[key]) for key in ("mean", "std"))
        image_size, resize_size = (
            None if facts.get(key) is None else int(facts[key]) for key in ("image_size", "resize_size")
        )
        return cls(mean, std, image_size, resize_size, _interpolation(facts.get("interpolation")))


def of_file(model: str, sha256: str) -> Preprocessing:
    """Return the images that a file of weights for this model expects.

    A file that torchvision published is known by its hash, whatever its name is. Of other files for torchvision's
    models only mean and deviation are taken over, from the first weights that torchvision published for the model.
    For timm's models they come from the default weights, or from the weights of the tag in the model's name.

    Args:
        model: name of the model.
        sha256: SHA-256 of the file.
    """
    if is_timm(model):
        return _of_timm(model)
    weights = published_by_torchvision(model)
    for published in weights:
        if sha256.startswith(published_hash(published.url)):
            return of_torchvision(model, published)
    usual: Any = weights[0].transforms() if weights else None
    return Preprocessing(_three(usual.mean), _three(usual.std)) if hasattr(usual, "crop_size") else Preprocessing()


def published_by_torchvision(model: str) -> list[Any]:
    """The weights that torchvision publishes for a model; none if it is not torchvision's."""
    from torchvision import models

    return list(models.get_model_weights(model)) if model in models.list_models() else []


def published_hash(url: str) -> str:
    """The beginning of the SHA-256 of a file that torchvision published, which its name ends with."""
    return url.rpartition("-")[2].partition(".")[0]


def of_torchvision(model: str, published: Any) -> Preprocessing:  # noqa: ANN401 (torchvision has no types)
    """Return the images that weights of torchvision expect; for videos, only the mean and the deviation.

    Detectors normalise images themselves, and segmentation networks take ImageNet's figures, as is usual: nothing.

    Args:
        model: name of the model. GoogLeNet and Inception v3 normalise again in a model that torchvision builds with
            weights (`transform_input`). Models here are built without, and both steps are one with 0.5.
        published: a member of the model's enumeration of weights.
    """
    transforms = published.transforms()
    if not hasattr(transforms, "crop_size"):
        return Preprocessing()
    mean, std = (_HALF, _HALF) if model in _NORMALIZING else (_three(transforms.mean), _three(transforms.std))
    if len(transforms.crop_size) == 2:  # height and width, of clips
        return Preprocessing(mean, std)
    (image_size,), (resize_size,) = transforms.crop_size, transforms.resize_size
    return Preprocessing(mean, std, image_size, resize_size, _interpolation(transforms.interpolation.value))


def _of_timm(model: str) -> Preprocessing:
    """Resize as timm does for a centre crop, which most of its models expect (`crop_mode`)."""
    facts = timm_settings(model)
    size = facts.input_size[-1]
    resize_size = math.floor(size / facts.crop_pct)
    return Preprocessing(_three(facts.mean), _three(facts.std), size, resize_size, _interpolation(facts.interpolation))


def _three(values: Any) -> Three:  # noqa: ANN401 (JSON, or a list of another library)
    red, green, blue = map(float, values)
    return red, green, blue


def _interpolation(name: str | None) -> Interpolation | None:
    return cast("Interpolation", name) if name in ("bilinear", "bicubic") else None
