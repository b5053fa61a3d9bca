"""Classification models of images and videos by name: of torchvision, timm and other packages; and small networks.

| name                     | model                                                              |
|--------------------------|--------------------------------------------------------------------|
| `digits`, `wrn16_8`      | any model of small_images.py                                       |
| `resnet50`               | any classification model of torchvision                            |
| `timm:convnext_tiny`     | any model of timm; the name may have a tag, which is of its weights |
| `package.module:factory` | what the function makes of num_classes, and image_size if it takes it |
"""

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version

import torch
from torch import nn

from raydali.errors import UsageError
from raydali.training.models.factories import (
    TIMM,
    build_by_factory,
    build_timm,
    is_factory,
    is_timm,
    known_timm_models,
    no_stochastic_depth,
    set_drop_path,
    takes_size,
    timm_settings,
)
from raydali.training.models.small_images import SMALL_IMAGE_MODELS, clips_network

SIZES_TRIED = 28, 32, 64, 96, 112, 128, 160, 192, 224, 256, 299, 384
"""Image sizes that are tried, to suggest one that a model accepts."""


def check_model(name: str, image_size: int = 224, *, drop_path: float | None = None) -> None:
    """Check that the name is a classification model's, and that the model accepts images of this size and a drop path.

    Models are tried on the meta device, without memory. A factory that fails there is tried on the CPU.

    Raises:
        UsageError: it is not. The message suggests similar names, or a size that the model accepts.
    """
    if is_factory(name):
        _check_factory(name, image_size)
    elif is_timm(name):
        names = known_timm_models()
        check_known(name.partition(".")[0], names, "timm:convnext_tiny", library="timm")
        timm_settings(name)
    else:
        import torchvision

        check_known(name, [*SMALL_IMAGE_MODELS, *torchvision.models.list_models(module=torchvision.models)], "resnet50")

    def unfit(size: int) -> str:
        return why_unfit(partial(build_model, name, 2, size), 3, size, size)

    if why := unfit(image_size):
        nearest = sorted(SIZES_TRIED, key=lambda size: abs(size - image_size))
        fit = next((f"--image-size {size}" for size in nearest if not unfit(size)), "another --model")
        raise UsageError(f"--model {name} cannot take images of {image_size}x{image_size} pixels ({why}): try {fit}")
    if is_factory(name) or is_timm(name):
        _check_output(name, image_size)
    if drop_path is not None:
        on_meta(partial(build_model, name, 2, image_size, drop_path=drop_path))


def check_sizes(name: str, image_sizes: Sequence[int], *, drop_path: float | None = None) -> None:
    """Check the model, as `check_model` does, for images of each of these sizes.

    Raises:
        UsageError: it does not accept one of them.
    """
    if len(image_sizes) > 1 and has_one_size(name):
        sizes = ", ".join(map(str, image_sizes))
        raise UsageError(
            f"--model {name} takes images of one size, and --image-size and --val-image-size give {sizes}: give one"
        )
    for size in image_sizes:
        check_model(name, size, drop_path=drop_path)


def _check_factory(name: str, image_size: int) -> None:
    try:
        on_meta(partial(build_model, name, 2, image_size))
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # the factory may raise anything
        why = " ".join(f"{type(error).__name__}: {error}".split())[:80]
        raise UsageError(f"--model {name} failed for num_classes=2: {why}") from error


def _check_output(name: str, image_size: int) -> None:
    """Check that a model of another package gives logits in training: some give more there than in evaluation."""
    model = on_meta(partial(build_model, name, 2, image_size))
    with _device(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            output = model.train()(torch.zeros(2, 3, image_size, image_size))
        except Exception:  # an operator without shapes, or a norm that needs larger images in training
            return
    shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if shape != (2, 2):
        raise UsageError(f"--model {name} gives {shape} for 2 images and 2 classes: it must give logits (N, classes)")


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model without memory, to look at its shapes; on the CPU if it needs the values of its weights."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return build()
        except UsageError:
            raise
        except Exception:  # RegNet reads its initial weights (NotImplementedError); others call item() and tolist()
            return build()


def head_names(build: Callable[[int], nn.Module], classes: int) -> frozenset[str]:
    """Return the names in the state dict whose shapes depend on the number of classes: the head's names.

    The model is built twice without memory, for `classes` and for one more, so that this is exact for every model.

    Args:
        build: makes the model for a number of classes.
        classes: the number of classes.
    """
    shapes, others = (tensor_shapes(build, number) for number in (classes, classes + 1))
    return frozenset(name for name, shape in shapes.items() if others.get(name) != shape)


def tensor_shapes(build: Callable[[int], nn.Module], classes: int) -> dict[str, torch.Size]:
    """Return the shapes in the state dict of a model of so many classes."""
    state = on_meta(partial(build, classes)).state_dict()
    return {name: tensor.shape for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def why_unfit(build: Callable[[], nn.Module], *shape: int) -> str:
    """Return why a model refuses inputs of this shape, in one line; empty if it accepts them or cannot be tried."""
    try:
        model = on_meta(build)
    except (RuntimeError, AssertionError, ValueError) as error:
        return _first_sentence(error)
    with _device(model), torch.no_grad():
        try:
            model.eval()(torch.zeros(1, *shape))
        except NotImplementedError:  # an operator without shapes
            return ""
        except Exception as error:  # a model of another package may raise anything
            return _first_sentence(error)
    return ""


def has_one_value_per_channel(build: Callable[[], nn.Module], image: torch.Tensor) -> bool:
    """Return whether a norm of a network in training refuses this image (C, ...) alone, since its map has one pixel.

    The network is tried without memory, and if that fails on the CPU.
    """
    for device in ("meta", "cpu"):
        try:
            with torch.device(device), torch.no_grad(), torch.random.fork_rng(devices=[]):
                network = build()
                getattr(network, "raw_outputs", network)(image[None].to(device))
            return False
        except Exception as error:
            if "more than 1 value per channel" in str(error):  # of torch.nn.functional.batch_norm
                return True
    return False


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0][:80]


def _device(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def has_one_size(name: str) -> bool:
    """Return whether the model is made for images of one size, because its weights depend on it.

    For torchvision and timm it is known. A factory that takes a size is taken for one that needs it.
    """
    if is_timm(name):
        return bool(timm_settings(name).fixed_input_size)
    return bool(takes_size(name)) if is_factory(name) else name.startswith(("vit_", "maxvit_"))


def check_known(name: str, names: Sequence[str], usual: str, *, library: str = "torchvision") -> None:
    """Check that a name is known.

    Raises:
        UsageError: it is not. The message suggests similar names, or `usual` if there are none.
    """
    if name not in names:
        longer = sorted(other for other in names if other.startswith(name))[:3]
        near = longer or difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        suggested = ", ".join(near) if name != TIMM and near else usual
        raise UsageError(f"--model {name} is not a model of {library} {version(library)}: try {suggested}")


def build_model(name: str, classes: int, image_size: int = 224, *, drop_path: float | None = None) -> nn.Module:
    """Return the randomly initialised model with `classes` outputs.

    Args:
        name: its name, see above.
        classes: number of classes.
        image_size: height and width of its images, in pixels.
        drop_path: the largest probability of stochastic depth, see `set_drop_path`; None for the model's own.

    Raises:
        UsageError: timm is not installed; a factory cannot be found, or made no module; the model has no stochastic
            depth that is known.
    """
    if is_timm(name):
        return build_timm(name, classes, image_size, drop_path=drop_path)
    model = build_by_factory(name, classes, image_size) if is_factory(name) else _build(name, classes, image_size)
    if drop_path is not None and not set_drop_path(model, drop_path):
        raise no_stochastic_depth(name)
    return model


def _build(name: str, classes: int, image_size: int) -> nn.Module:
    if name in SMALL_IMAGE_MODELS:
        return SMALL_IMAGE_MODELS[name](classes)
    import torchvision

    options: dict[str, object] = {}
    if name in ("googlenet", "inception_v3"):  # by default they have auxiliary outputs in training
        options = {"aux_logits": False, "init_weights": True}
    elif has_one_size(name):
        options = {"image_size": image_size} if name.startswith("vit_") else {"input_size": (image_size, image_size)}
    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes, **options)
    return model


def check_video_model(name: str, sequence_length: int, image_size: int) -> None:
    """Check that the name is a video model's, and that the model accepts clips of this size.

    Raises:
        UsageError: it is not. The message suggests similar names, or says why the size is not accepted.
    """
    import torchvision

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
    import torchvision

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    return model
