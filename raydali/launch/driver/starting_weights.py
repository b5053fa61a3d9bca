"""Reads the trained weights that a run starts from, and checks its model, before the driver starts anything."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydali.data.index.source import TrainAndVal, classes_of
from raydali.data.tasks.classification import validation_size
from raydali.errors import UsageError
from raydali.host.facts import versions
from raydali.launch.driver.cluster import call_on_nodes
from raydali.launch.driver.job_file import describe_job
from raydali.launch.driver.resume import PreviousRun
from raydali.launch.job import Job
from raydali.options.every_job import TrainingOptions
from raydali.options.subjects import StartingWeightsOptions
from raydali.run.find import newest_step, place_of
from raydali.run.folder import RunFolder
from raydali.text import error_line, plural, summarize

if TYPE_CHECKING:
    from torch import nn

    from raydali.training.weights.matching import MatchedWeights
    from raydali.training.weights.reading import Weights

SHA256 = "weights_sha256"
"""The setting in config.json that identifies the weights, since their file may move."""
IMPORT_SECONDS = 120
"""Limit of the wait for the nodes' imports; PyTorch from a cold network drive takes a minute."""
MODEL_SETTINGS = "model", "image_size", "resize_size", "interpolation", "mean", "std"
"""Settings that model.json repeats; its image_size is the size of validation images."""


def read_starting_weights(
    options: TrainingOptions, folder: RunFolder, earlier: PreviousRun | None
) -> "tuple[str | None, Weights | None]":
    """Return the SHA-256 of the weights in `--weights`, and the weights if the run needs them.

    A resume with the same option does not read them, since its checkpoint has all weights.

    Raises:
        UsageError: they cannot be read.
    """
    if not isinstance(options, StartingWeightsOptions) or options.weights is None:
        return None, None
    resumes = earlier is not None and newest_step(folder) is not None
    if earlier is not None and resumes and earlier.settings.get("weights") == options.weights:
        return earlier.settings.get(SHA256), None
    from raydali.training.weights.reading import read_weights

    run = place_of(options.weights)
    source = run if Path(run).is_dir() else options.weights
    weights = read_weights(source, getattr(options, "model", ""), validation_size(vars(options)))
    return weights.sha256, None if resumes else weights


def check_freeze(options: TrainingOptions, build: "Callable[[int], nn.Module]", classes: Sequence[str]) -> None:
    """Check that `--freeze` leaves some parameters of the job's model to train.

    Raises:
        UsageError: it does not, or it matches none.
    """
    if isinstance(options, StartingWeightsOptions) and options.freeze is not None:
        from raydali.training.finetuning import freeze
        from raydali.training.models.classification import on_meta

        freeze(on_meta(partial(build, len(classes))), options.freeze)


def check_one_sample(job: Job[Any], options: TrainingOptions, data: TrainAndVal[Any]) -> None:
    """Check that the network can be trained on micro-batches of one sample, if they are that small.

    Raises:
        UsageError: a BatchNorm would get one value per channel, as of a map of 1x1, at the image size of some epoch.
    """
    if options.batch_size > 1 or options.sync_bn:
        return
    from raydali.training.finetuning import freeze
    from raydali.training.models.classification import has_one_value_per_channel

    def build() -> "nn.Module":
        model = job.build_model(options, len(classes_of(data.train)))
        network = job.network(model, options).train()
        if isinstance(options, StartingWeightsOptions) and options.freeze is not None:
            freeze(model, options.freeze)
        return network

    for pipeline, _ in groupby(map(job.train_pipeline(options).in_epoch, range(options.epochs))):
        try:
            image = pipeline.sample(data.train, 0, 0)[0]
        except Exception:  # the workers replace a sample that cannot be read
            continue
        if has_one_value_per_channel(build, image):
            whole = options.order_batch_size or options.global_batch_size or 2
            size = next((size for size in range(2, whole + 1) if whole % size == 0), 2)
            larger = f"--batch-size {size}" + (f" --global-batch-size {size}" if whole == 1 else "")
            raise UsageError(
                f"--batch-size 1 gives a BatchNorm of the network one value per channel, of a map of 1x1, but it needs "
                f"at least 2: give {larger}"
            )


def check_imports(options: TrainingOptions, warn: Callable[[str], None]) -> None:
    """Check that each node of the cluster can import the module of `--model timm:NAME` or `--model MODULE:FACTORY`.

    Args:
        options: the options of the run.
        warn: takes the nodes that have not answered in time. They may be lost, or their drives slow.

    Raises:
        UsageError: names the node and the error.
    """
    model: str = getattr(options, "model", "")
    before, colon, _ = model.partition(":")
    if not colon:
        return
    import ray

    def failure() -> str:
        import importlib

        try:
            importlib.import_module(before)
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
    answers = call_on_nodes(failure, [(node["NodeID"], ()) for node in nodes], IMPORT_SECONDS)
    silent = list[str]()
    for node, answer in zip(nodes, answers, strict=True):
        name = f"{node['NodeID'][:8]} at {node['NodeManagerAddress']}"
        if isinstance(answer, Exception):
            silent.append(name)
        elif answer:
            why = error_line(answer)[:60]
            raise UsageError(
                f"--model {model} cannot be imported on node {name} ({why}): install {before} "
                "there, or send it with ray job submit --working-dir"
            )
    if silent:
        warn(f"{plural(len(silent), 'node')} ({summarize(silent)}) could not be asked whether they import {before}")


def fine_tuning_line(settings: Mapping[str, Any]) -> str:
    """Describe how the weights are trained further, since the defaults are others than without them."""
    names = ["epochs", "batch_size", "optimizer", "learning_rate", "weight_decay", "layer_decay", "head_lr_scale"]
    options = [f"--{name.replace('_', '-')} {settings[name]}" for name in names if settings.get(name) is not None]
    return f"fine-tuning with {' '.join(options)}: each option may be given"


def model_facts(
    job_file: str, labels: Sequence[tuple[str, int]], settings: Mapping[str, Any], matched: "MatchedWeights | None"
) -> dict[str, Any]:
    """Return the contents of the run's model.json, but for what training adds; `labels` are classes in order."""
    facts: dict[str, Any] = {
        "version": versions().get("raydali"),
        "job": describe_job(Path(job_file)),
        "classes": [name for name, _ in labels],
        "labels": dict(labels),
    }
    facts |= {name: settings[name] for name in MODEL_SETTINGS if name in settings}
    if "image_size" in settings:
        facts["image_size"] = validation_size(settings)
    if matched is not None:
        facts["weights"] = {
            "from": settings["weights"],
            "sha256": settings[SHA256],
            "loaded": len(matched.loaded),
            "skipped": [*matched.skipped],
            "missing": [*matched.missing],
        }
    return facts
