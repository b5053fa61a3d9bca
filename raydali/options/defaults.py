"""This file has the defaults of options that depend on facts about a run, each with its reason; see `resolve`.

    fact                                          options whose default depends on it
    what is installed                             loader
    the weights it starts from, the job           image_size, resize_size, mean, std, interpolation
    the largest number of workers                 global_batch_size, and batch_size of a recipe
    the training samples                          shuffle_block, shuffle_window, shuffle_apart
    the hardware of all workers                   precision, compile, fused

All other defaults are in the classes of the options, or in a recipe (training/recipe.py).

What is chosen is written to `config.json` by value, and a resume takes it from there, unless the option is given. Only
the loader is chosen at each start.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.source import Source
from raydali.data.stream.class_mixing import ClassMixing, fitting_window
from raydali.data.stream.read_together import ReadTogether
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import validation_size
from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD, default_resize_size
from raydali.extras import default_loader
from raydali.host.hardware import COMPILE_PAYS_FROM, fastest_precision
from raydali.options.every_job import TrainingOptions
from raydali.options.subjects import RecipeOptions
from raydali.training.recipe import find_recipe, micro_batch

HARDWARE_OPTIONS = "precision", "compile", "fused"
"""Options that are None until the workers know their hardware."""
SHUFFLE_OPTIONS = "shuffle_block", "shuffle_window", "shuffle_apart"
"""Options that are None until the driver knows the training samples and the number of workers."""
MODEL_INPUTS: Mapping[str, Any] = {
    "image_size": 224,
    "mean": IMAGENET_MEAN,
    "std": IMAGENET_STD,
    "interpolation": "bilinear",
}
"""Options of a model's inputs. These values hold if neither the starting weights nor the job say more, since most
models of torchvision were trained with them."""

HIGH_AMPLIFICATION = 2.0
"""Bytes read for a byte of samples from which blocks are worth their less random order."""
_WINDOW = 4
"""Blocks of a window, if these mix the classes: a process keeps the row groups of a window for each micro-batch."""
_MAX_GROUPS = 8
"""Row groups of a block: larger blocks are less torn where row groups are short, or lack samples."""
_WINDOWS_OF_MICRO_BATCH = 8
"""Windows that each micro-batch of a step goes through, at least: two micro-batches read the first and the last one."""

Options = TypeVar("Options", bound=TrainingOptions)
Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about a run that are known so far; None: not known yet.

    Attributes:
        weights_inputs: the inputs that the starting weights expect; a value is None if they do not say it.
        workers: the smallest and the largest number of workers.
        cpus: of each worker.
        samples: the number of training samples.
        source: the training samples.
        labels: of the training samples, if each has one.
        device: the type of the workers' devices, such as "cuda".
        bf16: whether all of them have bf16 units.
    """

    weights_inputs: Mapping[str, Any] | None = None
    workers: tuple[int, int] | None = None
    cpus: int = 1
    samples: int = 0
    source: Source | None = None
    labels: Labels | None = None
    device: str | None = None
    bf16: bool = False


def resolve(given: Options, kept: Mapping[str, Any], facts: Facts | None = None) -> Options:
    """Return the options with a value for each open one, as far as it is kept or the facts are known.

    Args:
        given: the options as they were parsed, or with values that were resolved before.
        kept: the settings of `config.json`, where None means not chosen yet; empty at a first start.
        facts: Default: none are known.

    Raises:
        UsageError: no such number of workers.
    """
    facts, options = facts or Facts(), given
    for rule in (_loader_and_kept, _model_inputs, _resize_size, _batches, _blocks, _window, _hardware):
        options = replace(options, **rule(options, kept, facts))
    return options


def defaults_of(config: type[TrainingOptions]) -> dict[str, Any]:
    """Return the settings that a run has if its `config.json` lacks them: options that are newer than the run."""
    return {option.name: option.default for option in fields(config) if option.default is not MISSING}


def open_options(options: TrainingOptions, *names: str) -> list[str]:
    """Return which of these options the job has without a value yet."""
    return [name for name in names if getattr(options, name, False) is None]


def _loader_and_kept(options: TrainingOptions, kept: Mapping[str, Any], _: Facts) -> dict[str, Any]:
    """Choose DALI, since it is faster, or PyTorch's loader where DALI is not installed, as on macOS.

    Keep what an earlier start has chosen: another choice would change the order or the numbers of the run.
    """
    loader = {"loader": default_loader()} if open_options(options, "loader") else {}
    return loader | {name: kept.get(name) for name in open_options(options, *HARDWARE_OPTIONS, *SHUFFLE_OPTIONS)}


def _known_inputs(options: TrainingOptions, kept: Mapping[str, Any], facts: Facts) -> list[Mapping[str, Any]]:
    """Return the known inputs of the model, those that count most first."""
    return [kept, facts.weights_inputs or {}, {**MODEL_INPUTS, **options.usual_inputs}]


def _model_inputs(options: TrainingOptions, kept: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Choose the inputs that the starting weights were trained with, else the usual ones of the job's models."""
    candidates, values = _known_inputs(options, kept, facts), dict[str, Any]()
    for name in open_options(options, *MODEL_INPUTS):
        value = next(inputs[name] for inputs in candidates if inputs.get(name) is not None)
        values[name] = tuple(value) if isinstance(value, list) else value
    return values


def _resize_size(options: TrainingOptions, kept: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Choose the size of the run or the weights, if validation images have theirs; else 8/7 of this size, as usual."""
    if not open_options(options, "resize_size"):
        return {}
    size = validation_size(vars(options))
    candidates = _known_inputs(options, kept, facts)
    sizes = (inputs.get("resize_size") for inputs in candidates if validation_size(inputs) == size)
    return {"resize_size": next(filter(None, sizes), None) or default_resize_size(size or 0)}


def _batches(options: TrainingOptions, kept: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Give each of the largest number of workers a full micro-batch.

    A recipe gives the global batch instead, and the largest micro-batch: with more workers they get smaller ones. A
    resume may divide the micro-batches with which the run began, and keeps its order.
    """
    workers = facts.workers[1] if facts.workers else (options.worker_range or (1, 1))[1]
    size = options.global_batch_size or kept.get("global_batch_size")
    if size is None:
        return {"global_batch_size": options.batch_size * workers} if facts.workers else {}
    batch_size, began = options.batch_size, kept.get("order_batch_size") or kept.get("batch_size")
    recipe = options.recipe if isinstance(options, RecipeOptions) else None
    if recipe is not None and batch_size == find_recipe(recipe).settings.batch_size:
        batch_size = began or micro_batch(size, batch_size, workers)
    order = None if began == batch_size else began
    return {"global_batch_size": size, "batch_size": batch_size, "order_batch_size": order}


def _blocks(options: TrainingOptions, _: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Choose blocks only for samples that are read with their neighbours, as rows of Parquet are by row groups.

    A full shuffle would read a row group for each sample. If it reads more than `HIGH_AMPLIFICATION` times the bytes of
    the samples, blocks of row groups are shuffled that fit into the memory that a process keeps for them. If these do
    not mix the classes, or read no less than half, there are none. Repeats of the same block would not stay apart.
    """
    if facts.workers is None or facts.source is None:
        return {}
    no_blocks: dict[str, Any] = {
        "shuffle_block": options.shuffle_block or 0,
        "shuffle_apart": options.shuffle_apart or False,
    }
    together: ReadTogether | None = getattr(facts.source, "read_together", None)
    is_chosen = options.shuffle_block is not None or options.repeats > 1 or options.class_sampling is not None
    if is_chosen or together is None or together.fits:
        return no_blocks
    full = replace(options, **no_blocks).stream(facts.samples)
    if (reads := amplification(full, options, facts)) <= HIGH_AMPLIFICATION:
        return no_blocks
    micro_batches, groups = full.micro_batches_per_step, len(together.group_bytes)
    of_worker = -(-micro_batches // facts.workers[0])
    fit = together.kept_bytes // (2 * of_worker * _WINDOW * int(np.median(together.group_bytes)))
    fit = min(fit, groups // (micro_batches * _WINDOW * _WINDOWS_OF_MICRO_BATCH), _MAX_GROUPS)
    block = max(fit, 1) * together.samples_per_group
    stream = replace(full, shuffle_block=block, shuffle_window=_WINDOW, shuffle_apart=True)
    if facts.labels is not None and not ClassMixing.of(facts.labels, stream).is_enough:
        stream = replace(stream, shuffle_window=fitting_window(facts.labels, stream))
        if not ClassMixing.of(facts.labels, stream).is_enough:
            return no_blocks
    if amplification(stream, options, facts) > reads / HIGH_AMPLIFICATION:
        return no_blocks
    return {"shuffle_block": block, "shuffle_window": stream.shuffle_window, "shuffle_apart": True}


def _window(options: TrainingOptions, _: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Mix enough blocks that a global batch of samples sorted by class has as many classes as in a full shuffle."""
    if facts.workers is None or not options.shuffle_block or options.shuffle_window is not None:
        return {}
    return {"shuffle_window": fitting_window(facts.labels, options.stream(facts.samples))}


def _hardware(options: TrainingOptions, _: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    """Choose the fastest precision of all devices, and compile on GPUs in runs that are long enough to gain from it.

    Compiled models on GPUs have fused operations, which need less of the GPU's memory bandwidth. But without a CUDA
    graph, the host takes longer to launch them than Inductor's kernels.
    """
    if facts.device is None or not open_options(options, *HARDWARE_OPTIONS):
        return {}
    on_gpu = facts.device == "cuda"
    compiled, fused = options.compile, options.fused
    if compiled is None:
        pays = options.stream(facts.samples).steps >= COMPILE_PAYS_FROM
        compiled = on_gpu and (pays or fused is True)
    precision = options.precision or fastest_precision(facts.device, bf16=facts.bf16)
    return {
        "precision": "fp32" if precision == "fp16" and options.shard is not None else precision,
        "compile": compiled,
        "fused": on_gpu and compiled and (options.cuda_graph if fused is None else fused),
    }


def amplification(stream: Stream, options: TrainingOptions, facts: Facts) -> float:
    """Return how many bytes a worker reads for a byte of its samples; 1 if samples are read one by one."""
    together: ReadTogether | None = getattr(facts.source, "read_together", None)
    if together is None or together.fits or facts.workers is None:
        return 1.0
    # PyTorch's loader has a process for each thread, and each of them reads for itself.
    processes = facts.cpus if options.loader == "torch" else 1
    return max(together.amplification(stream, workers, processes) for workers in {*facts.workers})
