"""Epoch records: the measurements of all ranks, merged into a row of `epochs.jsonl`.

A value that was not measured is None.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from statistics import fmean
from typing import Any

from raydali.measure.verdict import verdict

VOID_ABOVE = 1.1
"""A larger share of the ceiling means that something slowed the machine down while the ceiling was measured. Shares
between 1 and this limit are a measurement error, and count as 1."""


@dataclass(kw_only=True, slots=True)
class RankRecord:
    """The measurements of one rank in an epoch, or in the part of an epoch that one worker group ran.

    Times are in seconds. The times of the loader, the steps and the checkpoints add up to `seconds`, apart from the
    time of the loop itself. Validation is not included.
    """

    rank: int
    world_size: int
    node: str
    images: int
    loss_sum: float
    """Training loss, added up over images."""
    seconds: float
    loader_wait_seconds: float
    step_seconds: float
    checkpoint_seconds: float
    first_batch_seconds: float | None
    """Wait for the worker's first batch; None if it came before this record."""

    replaced: int = 0
    """Number of broken samples that were replaced."""
    left_out: int = 0
    """Number of images in steps that were taken back, see `--on-bad-loss`. `loss_sum` lacks them."""

    storage: dict[str, int] = field(default_factory=dict)
    """What was read from buckets, validation included, see `read_counts.Counts`; empty if nothing was."""

    group: str = ""
    """The id of the worker group, see `run.ledger.Held`; empty outside of a launched run."""

    # Inputs of the verdict.
    device: str = "cpu"
    has_bf16: bool = False
    """True if the device has bf16 units; otherwise the verdict does not advise bf16."""
    peak_flops: float | None = None
    """Operations a second that the device can do in the precision of training; None if it is not known."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of the device's memory, or of the process on a CPU; see `memory_of`."""
    steps: int = 0
    first_step_seconds: float | None = None
    """Host time of the worker's first step, without the loader and the all-reduce; None if the step came before this
    record."""
    exchange_seconds: float | None = None
    """The part of `step_seconds` between this rank's last gradient and the end of the all-reduce, estimated from
    samples inside a CUDA graph; None for one rank, or if it was not measured."""
    shortest_exchange_seconds: float | None = None
    """The same time in the step where it is shortest: an upper bound of the duration of the all-reduce itself."""
    loader_waits: dict[str, float] = field(default_factory=dict)
    """Time for which the loader blocked the host after the first batch, by cause; empty if unknown."""
    python_seconds: float = 0.0
    """CPU time of the loader's Python after the first batch, during which the training thread could not run Python."""
    cpu_seconds: float | None = None
    """CPU time of this rank's processes. This time and the following ones include validation."""
    cpu_queued_seconds: float | None = None
    """Time for which the training thread was ready to run and waited for a core."""
    helpers_seconds: float | None = None
    """CPU time of all threads except the training thread; most of them are the loader's."""
    helpers_queued_seconds: float | None = None
    """Time for which these threads were ready to run and waited for a core."""
    host_busy_seconds: float | None = None
    """CPU time of all processes on the cores that this rank may use."""
    host_idle_seconds: float | None = None
    """Idle time of these cores."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The measurements of one rank in the last seconds; None for what could not be measured."""

    images: int
    """Number of images that the rank trained on. Over a run, each image counts once."""
    images_per_second: float | None = None
    """Training speed of this rank, validation excluded."""
    of_ceiling: float | None = None
    """That speed as a share of this rank's part of the ceiling."""
    loader_wait_fraction: float | None = None
    """Share of the time, validation excluded, in which the rank waited for the loader."""
    step_seconds: float | None = None
    """Time of forward pass, backward pass and optimizer; mean over steps."""
    own_step_seconds: float | None = None
    """The same time without the wait for other ranks' gradients; None inside a CUDA graph, which hides the wait."""
    loss: float | None = None
    """Mean loss over images; on a GPU, over the images of the previous interval."""
    prepared_batches: int | None = None
    """See `Loader.prepared_batches`."""


Segment = Sequence[RankRecord]
"""The records of all ranks of one worker group, ordered by rank."""


def segment_of(rows: Iterable[Mapping[str, Any]]) -> list[RankRecord]:
    """Return the records of these rows, which come from checkpoints and from other ranks.

    What another version of raydali has measured besides is passed over.
    """
    names = {field.name for field in fields(RankRecord)}
    return [RankRecord(**{name: value for name, value in row.items() if name in names}) for row in rows]


def epoch_record(
    segments: Sequence[Segment],
    *,
    epoch: int,
    step: int,
    samples_consumed: int,
    learning_rate: float | None,
    validation: Mapping[str, Any] | None,
    quarantined: int,
    ceiling_images_per_second: float | None,
    flops_per_image: float | None = None,
    gpu_busy: float | None = None,
    options: object = None,
    useful_block: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """Return a row of `epochs.jsonl`; an argument with the name of a column is copied to the row.

    A time is the mean over ranks, summed over segments. `seconds` is the time of the slowest rank, summed over
    segments. Images are summed over both.

    Args:
        segments: one for each worker group that ran a part of the epoch.
        epoch: the epoch's number, from 0.
        step: number of completed steps of the run.
        samples_consumed: number of samples that these steps consumed.
        learning_rate: the learning rate of the last step.
        validation: the metrics; None if there was no validation.
        quarantined: samples of the epoch that were replaced because they are broken.
        ceiling_images_per_second: the ceiling of the last segment's workers. The row omits it if other segments had
            another number of workers, or if the epoch is faster (`share_of_ceiling`).
        flops_per_image: operations of the forward and backward pass of a sample; None if they are not counted.
        gpu_busy: share of a step at the ceiling in which GPUs compute; None if it was not measured.
        options: the job's options, a dataclass, for the verdict's advice; None for a training loop without a job.
        useful_block: see `verdict`.
    """

    def seconds(name: str) -> float:
        return sum(fmean(getattr(record, name) for record in segment) for segment in segments)

    records = [record for segment in segments for record in segment]
    images, loss_sum = sum(record.images for record in records), sum(record.loss_sum for record in records)
    left_out = sum(record.left_out for record in records)
    wall = sum(max(record.seconds for record in segment) for segment in segments)
    first_batches = [record.first_batch_seconds for record in records if record.first_batch_seconds is not None]
    wait = seconds("loader_wait_seconds")
    rate = images / wall if wall else None
    if len({segment[0].world_size for segment in segments}) > 1:
        ceiling_images_per_second = None
    of_ceiling = share_of_ceiling(rate, ceiling_images_per_second)
    if rate and of_ceiling is None:
        ceiling_images_per_second = None
    names = dict.fromkeys(name for record in records for name in record.storage)
    storage = {name: sum(record.storage.get(name, 0) for record in records) for name in names} or None
    workers, sharded_over = segments[-1][0].world_size, getattr(options, "sharded_over", None)
    line: dict[str, Any] = {
        "epoch": epoch,
        "step": step,
        "samples_consumed": samples_consumed,
        "world_size": workers,
        "sharded_over": 1 if sharded_over is None else sharded_over(workers),
        "images": images,
        "seconds": wall,
        "images_per_second": rate,
        "loader_wait_seconds": wait,
        "loader_wait_fraction": wait / wall if wall else None,
        "step_seconds": seconds("step_seconds"),
        "first_batch_seconds": max(first_batches, default=None),
        "loader_images_per_second": None,
        "ceiling_images_per_second": ceiling_images_per_second,
        "of_ceiling": of_ceiling,
        "gpu_busy": gpu_busy,
        "flops_per_image": flops_per_image,
        "mfu": _utilisation(segments, images * flops_per_image) if flops_per_image else None,
        "loss": loss_sum / (images - left_out) if images > left_out else None,
        "learning_rate": learning_rate,
        "validation": validation,
        "checkpoint_seconds": seconds("checkpoint_seconds"),
        "quarantined": quarantined,
        "left_out": left_out,
        "storage": storage,
        "cached": _cached(storage) if storage and getattr(options, "cache", None) else None,
        "verdict": None,
        "costs": None,
        "ranks": [asdict(record) for record in records],
    }
    try:
        result = verdict(line, options, useful_block)
    except Exception as error:  # a description must not end the run
        warnings.warn(f"no verdict could be found: {type(error).__name__}: {error}", stacklevel=2)
        return line
    if result:
        line["verdict"], line["costs"] = result.text, result.costs
        if result.kind == "loader-bound":
            line["loader_images_per_second"] = rate
    return line


def _cached(storage: Mapping[str, int]) -> float | None:
    """Return the share of the reads of a bucket's objects that caches answered."""
    hits = storage["hits"] + storage["peer_hits"]
    return hits / (hits + storage["requests"]) if hits or storage["requests"] else None


def _utilisation(segments: Sequence[Segment], flops: float) -> float | None:
    """Return these operations as a share of those that the devices can do; None if a device's peak is not known."""
    possible = 0.0
    for segment in segments:
        peaks = [record.peak_flops for record in segment if record.peak_flops is not None]
        if len(peaks) < len(segment):
            return None
        possible += max(record.seconds for record in segment) * sum(peaks)
    return flops / possible if possible else None


def share_of_ceiling(images_per_second: float | None, ceiling: float | None) -> float | None:
    """Return a rate as a share of the ceiling, at most 1; None if one is not known or the ceiling cannot be right."""
    share = images_per_second / ceiling if images_per_second and ceiling else None
    return None if share is None or share > VOID_ABOVE else min(share, 1.0)
