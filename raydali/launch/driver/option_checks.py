"""Checks that options fit together and fit the cluster: an error for what cannot be used, a warning for the rest."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from raydali.data.index.source import Source, class_labels, classes_of
from raydali.data.stream.class_mixing import ClassMixing, fitting_window, is_useful, useful_block
from raydali.data.stream.read_together import ReadTogether
from raydali.data.tasks.classification import validation_size
from raydali.data.tasks.settings import default_resize_size
from raydali.errors import UsageError
from raydali.extras import default_loader, require_dali, require_extra
from raydali.host.cpu_times import usable_cores
from raydali.launch.driver.cluster import Cluster
from raydali.launch.driver.own_ray import cpus_for
from raydali.launch.driver.placement import Placement
from raydali.options.defaults import HIGH_AMPLIFICATION, Facts, amplification
from raydali.options.every_job import TrainingOptions
from raydali.options.subjects import OptimizerOptions
from raydali.text import plural

SHARDED_OPTIMIZERS = "sgd", "adamw"


def check_loader(options: TrainingOptions, tell: Callable[[str], None]) -> None:
    """Tell that the default is the slower loader, because NVIDIA DALI is not installed.

    Raises:
        UsageError: the loader that was given is not installed.
    """
    if options.loader == "dali":
        require_dali("--loader dali", "leave --loader out")
    if options.loader is None and default_loader() == "torch":
        tell("NVIDIA DALI is not installed here, so PyTorch's loader is used, which is slower")


def check(options: TrainingOptions, samples: int, placement: Placement | None = None) -> None:
    """Refuse options that cannot be used; with a placement also those that depend on the cluster.

    Raises:
        UsageError: names the values that do not fit together, and the remedy.
    """
    if placement is None:
        if not os.environ.get("RAY_ADDRESS"):
            cpus_for(options)  # before anything is started or written
        workers = options.worker_range[1] if options.worker_range else 1
    else:
        workers = placement.maximum
    global_batch_size = options.global_batch_size or options.batch_size * workers
    stream = replace(options, global_batch_size=global_batch_size).stream(samples)
    stream.micro_batches_of(0, workers)
    if isinstance(options, OptimizerOptions) and options.optimizer in ("lamb", "lars"):
        require_extra("timm", "timm", "LAMB and LARS")
    if options.shard is not None:
        _check_shard(options, placement)
    if not options.sync_bn:
        return
    if options.no_gpu or (placement is not None and not placement.gpu):
        raise UsageError("--sync-bn needs GPUs, and this run trains on CPUs: leave it out, or train on GPUs")
    if options.workers is not None and ":" in options.workers:
        raise UsageError(f"--sync-bn needs a fixed number of workers, not --workers {options.workers}")
    if stream.micro_batches_per_step % workers:
        raise UsageError(
            f"--sync-bn needs a number of workers that divides the {stream.micro_batches_per_step} micro-batches of a "
            f"global batch, not {workers}: lower --workers or --batch-size"
        )


def _check_shard(options: TrainingOptions, placement: Placement | None) -> None:
    name = getattr(options, "optimizer", "sgd")
    if name not in SHARDED_OPTIMIZERS:
        raise UsageError(f"--shard cannot shard --optimizer {name}: give {' or '.join(SHARDED_OPTIMIZERS)}")
    if not isinstance(options.shard, int):
        return
    least, most = (placement.minimum, placement.maximum) if placement else options.worker_range or (0, 0)
    if least < most:
        raise UsageError(f"--shard {options.shard} needs a fixed number of workers, not --workers {options.workers}")
    if most % options.shard:
        raise UsageError(f"--shard {options.shard} does not divide {plural(most, 'worker')}: give a number that does")


def warnings_of(
    options: TrainingOptions,
    placement: Placement,
    cluster: Cluster,
    samples: int,
    labels: NDArray[np.int64] | None,
    *,
    own: bool,
) -> Iterator[str]:
    """Yield what makes a run slow or fragile, whose global batch size is known."""
    assert options.global_batch_size is not None
    workers, cores = placement.maximum, usable_cores()
    batch_size = min(options.batch_size, samples // (2 * workers))
    if batch_size and samples < 2 * options.global_batch_size:
        smaller = f"--batch-size {batch_size} " if batch_size < options.batch_size else ""
        most = samples // 2 // (batch_size * workers) * batch_size * workers
        yield (
            f"an epoch of {plural(samples, 'sample')} has fewer than two global batches of "
            f"{options.global_batch_size}, and may get no line: give at most {smaller}--global-batch-size {most}"
        )
    if warning := window_warning(options, samples, labels):
        yield warning
    if own and workers * placement.cpus > cores:
        yield (
            f"{plural(workers, 'worker')} of {placement} share {plural(cores, 'core')}, which makes them slow: "
            "lower --workers or --cpus-per-worker"
        )
    batches = options.global_batch_size // options.batch_size
    if batches % workers:
        yield (
            f"{workers} workers cannot share {plural(batches, 'micro-batch')} of a step equally, so some wait: "
            f"give a number of --workers that divides {batches}"
        )
    if placement.minimum < workers and not options.checkpoint_every:
        yield (
            f"with --workers {options.workers}, a lost node costs all steps since the newest checkpoint, up to an "
            "epoch: set --checkpoint-every"
        )
    if placement.reachable < workers:
        yield f"the cluster ({cluster}) has room for {placement.reachable} of at most {plural(workers, 'worker')}"


def window_warning(options: TrainingOptions, samples: int, labels: NDArray[np.int64] | None) -> str:
    """Return a warning about shuffling in blocks with these labels; empty for none."""
    stream = options.stream(samples)
    if not stream.shuffle_block or labels is None:
        return ""
    option, mixing = f"--shuffle-block {stream.shuffle_block}", ClassMixing.of(labels, stream)
    if mixing.is_enough and (stream.shuffle_apart or is_useful(stream)):  # blocks apart are read together
        return ""
    fitted = replace(stream, shuffle_window=fitting_window(labels, stream))
    if is_useful(fitted):
        remedy = f"--shuffle-window {fitted.shuffle_window}"
    else:
        block = useful_block(labels, stream)
        remedy = f"--shuffle-block {block}" if block else "no --shuffle-block"
    if not mixing.is_enough:
        return (
            f"with {option}, a global batch has samples of {mixing.in_blocks} classes (median) instead of "
            f"{mixing.in_full}: give another --name and {remedy}"
        )
    return (
        f"{option} keeps no neighbours together, since {mixing.in_full} classes in a global batch need blocks from "
        f"everywhere: try {remedy}"
    )


def crop_warning(options: TrainingOptions) -> str:
    """Return a warning about a centre crop of less than half of the side; empty for none."""
    side, shorter = validation_size(vars(options)), getattr(options, "resize_size", None)
    if side is None or shorter is None or 2 * side >= shorter:
        return ""
    share = f"{(side / shorter) ** 2:.1%} of a square image"
    return (
        f"centre crops of --image-size {side} out of --resize-size {shorter} show {share}: "
        f"try --resize-size {default_resize_size(side)}"
    )


def tell_amplification(
    before: TrainingOptions,
    options: TrainingOptions,
    facts: Facts,
    tell: Callable[[str], None],
    warn: Callable[[str], None],
) -> None:
    """Tell how much is read of samples that are read with others, if that needs blocks, or needs more than these.

    Args:
        before: the options before their blocks were chosen.
        options: the options after it.
        facts: by which they were chosen.
        tell: takes a line about what is read.
        warn: takes a line if much more is read than the samples.
    """
    together: ReadTogether | None = getattr(facts.source, "read_together", None)
    reads = amplification(options.stream(facts.samples), options, facts)
    is_chosen = before.shuffle_block is None and bool(options.shuffle_block)
    if together is None or (reads <= HIGH_AMPLIFICATION and not is_chosen):
        return
    begin = f"rows of Parquet are read in groups of {together.samples_per_group}"
    if reads > HIGH_AMPLIFICATION:
        is_open = before.shuffle_block is None and options.repeats == 1
        remedy = "smaller row groups or class folders would need less" if is_open else "see --shuffle-block"
        warn(f"{begin}: in this order, {reads:.1f} times the bytes of the images are read; {remedy}")
        return
    full = replace(options, shuffle_block=0, shuffle_window=0, shuffle_apart=False).stream(facts.samples)
    tell(
        f"{begin}: --shuffle-block {options.shuffle_block} reads {reads:.1f} times the bytes of the images, a full "
        f"shuffle {amplification(full, options, facts):.1f} times"
    )


def check_class_sampling(options: TrainingOptions, train: Source) -> None:
    """Refuse `--class-sampling` for samples without labels, and for classes without samples.

    Raises:
        UsageError: it cannot be done with these samples or options.
    """
    if options.class_sampling is None:
        return
    labels = class_labels(train)
    if labels is None:
        raise UsageError(f"--class-sampling {options.class_sampling} needs samples with classes: leave it out")
    one_each = getattr(train, "one_each", None)
    every = train.labels if one_each is None else one_each  # type: ignore[attr-defined]  # of several or of boxes
    used = {*np.flatnonzero(every.any(0) if every.ndim == 2 else np.bincount(every)).tolist()}
    names = enumerate(classes_of(train), start=getattr(train, "first_label", 0))
    if empty := [name for number, name in names if number not in used]:
        raise UsageError(
            f"--class-sampling can give no places to {plural(len(empty), 'class')} without training samples, such as "
            f"{empty[0]!r}: add samples, or leave the class out"
        )
