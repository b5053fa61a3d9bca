"""Options that the command line leaves open: they are chosen once, at the first start of a run.

The driver chooses what depends on the data; the workers choose what depends on the hardware, see
launch/worker/hardware_choices.py.
`config.json` holds the values from then on. A resume takes them from there on any hardware, unless the option is given.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.sources.file_rules import FILE_RULES, FIRST
from raydali.data.stream.class_mixing import ClassMixing, fitting_window, is_useful, useful_block
from raydali.data.tasks.image_sizes import validation_size
from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD, default_resize_size
from raydali.extras import default_loader, require_dali
from raydali.launch.options import LaunchOptions
from raydali.train.recipes.published import find_recipe
from raydali.train.recipes.recipe import micro_batch

CHOSEN = "precision", "compile", "fused"
"""Options that are None until the workers choose them."""
OF_SHUFFLING = "shuffle_block", "shuffle_window", "shuffle_apart"
"""Options that are None until the driver chooses them."""
INPUTS: Mapping[str, Any] = {
    "image_size": 224,
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "interpolation": "bilinear",
}
"""The inputs of a model, if neither an option nor the weights that it starts from say more."""
OF_EARLIER_VERSIONS = {
    "shuffle_window": 0,
    "shuffle_apart": False,
    "fused": False,
    "video_rotation": "ignored",
    FILE_RULES: FIRST,
} | {name: INPUTS[name] for name in ("mean", "std", "interpolation")}
"""Settings of runs of earlier versions, which did not know these options and facts."""

Options = TypeVar("Options", bound=LaunchOptions)


def with_kept(options: Options, settings: Mapping[str, Any], of_weights: Mapping[str, Any] | None = None) -> Options:
    """Return the options with what was chosen before, unless something else is given now, and with the model's inputs.

    The resize size follows the size of validation images if there is none yet, or if that has changed.

    Args:
        options: those of this start.
        settings: those of `config.json`, where None also means not chosen yet; empty at a first start.
        of_weights: the inputs that the starting weights expect; a value is None if they do not say it.
    """
    kept: dict[str, Any] = {name: settings.get(name) for name in unchosen(options, (*CHOSEN, *OF_SHUFFLING))}
    known = [settings, of_weights or {}, {**INPUTS, **getattr(options, "usual_inputs", {})}]
    for name in unchosen(options, tuple(INPUTS)):
        value = next(each[name] for each in known if each.get(name) is not None)
        kept[name] = tuple(value) if isinstance(value, list) else value
    options = replace(options, **kept)
    if getattr(options, "resize_size", 0) is None:
        side = validation_size(vars(options))
        resize_sizes = (each.get("resize_size") for each in known if validation_size(each) == side)
        shorter = next(filter(None, resize_sizes), None) or default_resize_size(side or 0)
        resize: dict[str, Any] = {"resize_size": shorter}
        options = replace(options, **resize)
    return options


def with_micro_batch(options: Options, settings: Mapping[str, Any], workers: int | None = None) -> Options:
    """Return the options with the micro-batch of their recipe, unless another one is given; a resume keeps it.

    Args:
        options: those of this start.
        settings: those of `config.json`; empty at a first start.
        workers: the largest number of workers. Default: that of `--workers`, or 1.

    Raises:
        UsageError: no such number of workers.
    """
    recipe = getattr(options, "recipe", None)
    most = options.batch_size if recipe is None else find_recipe(recipe).settings.batch_size
    if recipe is None or options.batch_size != most or options.global_batch_size is None:
        return options
    workers = workers or (options.worker_range or (1, 1))[1]
    size = settings.get("batch_size") or micro_batch(options.global_batch_size, most, workers)
    return replace(options, batch_size=size)


def with_loader(options: Options, tell: Callable[[str], None]) -> Options:
    """Return the options with a loader that is installed here; unlike the other choices, each start makes it anew.

    Raises:
        UsageError: the loader that was given is not installed.
    """
    loader = getattr(options, "loader", "synthetic")
    if loader == "dali":
        require_dali("--loader dali", "leave --loader out")
    if loader is not None:
        return options
    if (loader := default_loader()) == "torch":
        tell("NVIDIA DALI is not installed here, so PyTorch's loader is used, which is slower")
    chosen: dict[str, Any] = {"loader": loader}
    return replace(options, **chosen)


def with_window(options: Options, samples: int, labels: NDArray[np.int64] | None) -> Options:
    """Return the options with the window of blocks that these labels need, if it is not given."""
    if not options.shuffle_block or options.shuffle_window is not None:
        return options
    return replace(options, shuffle_window=fitting_window(labels, options.stream(samples)))


def window_warning(options: LaunchOptions, samples: int, labels: NDArray[np.int64] | None) -> str:
    """Return a warning about shuffling in blocks with these labels; empty for none."""
    stream = options.stream(samples)
    if not stream.shuffle_block or labels is None:
        return ""
    said, mixing = f"--shuffle-block {stream.shuffle_block}", ClassMixing.of(labels, stream)
    if mixing.is_enough and (stream.shuffle_apart or is_useful(stream)):  # blocks apart: see row_group_choice.py
        return ""
    fitted = replace(stream, shuffle_window=fitting_window(labels, stream))
    if is_useful(fitted):
        remedy = f"--shuffle-window {fitted.shuffle_window}"
    else:
        block = useful_block(labels, stream)
        remedy = f"--shuffle-block {block}" if block else "no --shuffle-block"
    if not mixing.is_enough:
        return (
            f"with {said}, a global batch has samples of {mixing.in_blocks} classes (median) instead of "
            f"{mixing.in_full}: give another --name and {remedy}"
        )
    return (
        f"{said} keeps no neighbours together, since {mixing.in_full} classes in a global batch need blocks from "
        f"everywhere: try {remedy}"
    )


def crop_warning(options: LaunchOptions) -> str:
    """Return a warning about a centre crop of less than half of the side; empty for none."""
    side, shorter = validation_size(vars(options)), getattr(options, "resize_size", None)
    if side is None or shorter is None or 2 * side >= shorter:
        return ""
    share = f"{(side / shorter) ** 2:.1%} of a square image"
    return (
        f"centre crops of --image-size {side} out of --resize-size {shorter} show {share}: "
        f"try --resize-size {default_resize_size(side)}"
    )


def unchosen(options: LaunchOptions, names: Sequence[str] = CHOSEN) -> list[str]:
    """Return those of these options that are still open."""
    return [name for name in names if getattr(options, name, False) is None]
