"""Makes steps of a run again, for `raydali replay`: from a checkpoint before them, with the run's job and data."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from raydali.data.index.source import Source, TrainAndVal, class_labels, classes_of
from raydali.errors import RaydaliError, UsageError
from raydali.host.cpu_times import usable_cores
from raydali.host.facts import versions
from raydali.host.hardware import has_bf16
from raydali.inference.job_module import FoundRun
from raydali.launch.driver.starting_weights import read_starting_weights
from raydali.launch.worker.replay_session import Row, replayed, row_of
from raydali.options.every_job import TrainingOptions
from raydali.options.subjects import StartingWeightsOptions
from raydali.run.checkpoints import read_checkpoint
from raydali.run.data_contents import compared_contents
from raydali.run.find import complete_ones, name_of, step_of
from raydali.run.folder import EVENTS, RunFolder
from raydali.text import error_line, plural
from raydali.training.checkpoint_file import BadCheckpointError
from raydali.training.weights.matching import match
from raydali.training.worker import Worker


def replay(
    run: FoundRun, config: TrainingOptions, settings: Mapping[str, Any], steps: range, device: str
) -> tuple[dict[str, Any], Source | None]:
    """Make steps of a run again, and return what replay.json has, and the training set if it is at hand.

    Micro-batches also have their "inputs" and "tensors", see `replayed`. If the steps cannot be trained again, "failed"
    says why, and "steps" has what is known without that. `settings` is the run's config.json.
    """
    starts = [row for row in run.folder.rows(EVENTS) if row["event"] in ("start", "resume")]

    def began(step: int) -> dict[str, Any]:
        return next((row for row in reversed(starts) if row["step"] <= step), {})

    notes, failed = [*_why_other(run, config, began(steps[0]), device)], ""
    rows, source = list[Row](), None
    try:
        data = _checked_data(run, config, settings, notes)
        source = data.train
        rows = _trained(run, config, data, steps, device, notes)
    except Exception as error:  # data, a job or a PyTorch that have changed may raise anything; the rest is shown
        failed = str(error) if isinstance(error, RaydaliError) else error_line(repr(error))
    rows, pipeline = rows or _untrained(config, settings["samples"], source, steps), run.job.train_pipeline(config)
    for batch in (batch for row in rows for batch in row["micro_batches"]):
        batch["rank"] = batch["micro_batch"] % began(batch["step"]).get("world_size", 1)
        of_epoch = pipeline.in_epoch(batch["counts_to"])
        for sample in batch["samples"]:
            sample["path"] = None if source is None else source.path(sample["read"])
            if hasattr(of_epoch, "draws"):  # as raydali's pipelines have
                drawn = of_epoch.draws(np.array([sample["read"]]), np.array([sample["key"]]))
                sample["draws"] = [part[0].tolist() for part in (drawn if isinstance(drawn, tuple) else [drawn])]
    return {"run": str(run.folder), "notes": notes, "failed": failed, "steps": rows}, source


def _why_other(run: FoundRun, config: TrainingOptions, began: Mapping[str, Any], device: str) -> Iterator[str]:
    """Yield why losses may be others than in the run, whose workers began with this event."""
    if run.unchanged is False:
        yield f"{run.file.name} has changed since the run began"
    there, here = (facts.get("torch") for facts in (began.get("versions", {}), versions()))
    if there not in (None, here):
        yield f"the run used PyTorch {there}, and this is {here}"
    if began.get("device", device[:4]) != device[:4]:
        yield f"the run trained on {began['device']}, and this is {device}, where sums and decoders round otherwise"
    if config.order_batch_size not in (None, config.batch_size):
        sizes = f"{config.order_batch_size} samples into {config.batch_size}"
        yield f"a resume divided micro-batches of {sizes}, so that earlier steps had other ones"
    if config.sync_bn and began.get("world_size", 1) > 1:
        yield "SyncBatchNorm had the statistics of all workers, and each micro-batch has its own here"


def _checked_data(
    run: FoundRun, config: TrainingOptions, settings: Mapping[str, Any], notes: list[str]
) -> TrainAndVal[Any]:
    """Return the run's data, and note which files have changed.

    Raises:
        UsageError: the data are others, or not at hand.
    """
    data: TrainAndVal[Any] = run.job.open_data(config)
    if (len(data.train), data.train.fingerprint) != (settings["samples"], settings["fingerprint"]):
        raise UsageError(
            f"the data have {plural(len(data.train), 'sample')} with other names or labels than the run's "
            f"{settings['samples']}: give the run's by --data"
        )
    changed, _ = compared_contents(run.folder, (data.train,))
    if changed:
        notes.append(f"other contents than when the run read them have {changed}")
    return data


def _trained(
    run: FoundRun, config: TrainingOptions, data: TrainAndVal[Any], steps: range, device: str, notes: list[str]
) -> list[Row]:
    """Train again from a checkpoint, and return the steps."""
    worker = Worker.join(torch.device(device), cpus=usable_cores(), node="")
    precision = config.precision
    if device == "cpu" and (precision == "fp16" or (precision == "bf16" and not has_bf16(worker.device))):
        notes.append(f"the run trained in {precision}, and this CPU computes in fp32")
        precision = "fp32"
    changes: dict[str, Any] = {
        **dict.fromkeys(("compile", "fused", "cuda_graph", "ceiling", "trace_samples"), False),
        **dict.fromkeys(("profile_steps", "patience", "stop_after", "shard")),
        "precision": precision,
        "on_bad_loss": "skip" if config.on_bad_loss == "skip" else "warn",
        "checkpoint_every": 0,
        "validate_every": config.epochs,
    }
    config = replace(config, **changes)
    begin, checkpoint = _checkpoint(run.folder, steps[0])
    weights, origin = None, name_of(begin) if begin else "the start"
    if begin > steps[0]:
        notes.append(f"weights are those of {origin}, since no checkpoint from before step {steps[0]} is near")
        checkpoint["stream"] = config.stream(len(data.train)).state(steps[0])
    else:
        notes.append(f"trained again from {origin}: {plural(steps[0] - begin, 'step')} before step {steps[0]}")
    if not begin and isinstance(config, StartingWeightsOptions):
        _, read = read_starting_weights(config, run.folder, None)
        classes = classes_of(data.train)
        if read is not None:
            weights = match(read, partial(run.job.build_model, config), len(classes), classes, config.new_layers)
    return replayed(run.job.train, config, data, worker, steps, checkpoint=checkpoint or None, weights=weights)


def _checkpoint(folder: RunFolder, step: int) -> tuple[int, dict[str, Any]]:
    """Return the step and the state of the newest checkpoint before a step, or of a later one if that is nearer.

    The start of the run is step 0, whose state is empty.
    """
    kept = [*map(step_of, complete_ones(folder))]
    before = max((each for each in kept if each <= step), default=0)
    begin = before or min([0, *kept], key=lambda each: abs(each - step))
    if not begin:
        return 0, {}
    try:
        return begin, read_checkpoint(folder, name_of(begin))
    except BadCheckpointError as error:
        path = f"{folder}/{name_of(begin)}"
        raise UsageError(f"{path} is damaged ({error}): move it away, and the one before is used") from error


def _untrained(config: TrainingOptions, samples: int, source: Source | None, steps: range) -> list[Row]:
    """Return what is known of steps that were not trained again: the ids, unless their order depends on labels."""
    needs_labels = config.class_sampling is not None
    stream = config.stream(samples, class_labels(source) if needs_labels and source is not None else None)
    indices = range(0 if needs_labels and source is None else stream.micro_batches_per_step)
    return [{"step": step, "micro_batches": [row_of(stream.micro_batch(step, i)) for i in indices]} for step in steps]
