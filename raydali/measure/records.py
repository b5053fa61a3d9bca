"""Epoch records: what each rank measured, merged into a line of `epochs.jsonl`. A value not measured is None."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from raydali.measure.ceiling import share_of_ceiling
from raydali.measure.verdict import verdict


@dataclass(kw_only=True, slots=True)
class RankRecord:
    """One rank's share of an epoch, or of the part of an epoch that one worker group ran.

    Times are in seconds; the loader's, the step's and the checkpoint's add up to `seconds` but for what the loop
    itself costs. Validation stands apart.
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
    """From asking for the worker's first batch to having it; None where that lay before this record."""

    replaced: int = 0
    """Broken samples that others stood in for."""

    # What the verdict is read from. With defaults, since older checkpoints lack it.
    device: str = "cpu"
    has_bf16: bool = False
    """True where the device has units for bf16: else it is no advice."""
    steps: int = 0
    first_step_seconds: float | None = None
    """Of the host: its own part of the worker's first step, without the loader and the exchange; None where that lay
    before this record."""
    exchange_seconds: float | None = None
    """The part of `step_seconds` in which this rank had its gradients and waited for the others'; inside a CUDA graph
    worked out from samples. None: one rank, or not measured."""
    shortest_exchange_seconds: float | None = None
    """Of a step: what exchanging gradients itself takes at most."""
    loader_waits: dict[str, float] = field(default_factory=dict)
    """How long the loader blocked the host behind the first batch, by cause; empty where it cannot tell."""
    python_seconds: float = 0.0
    """Computing of the loader's Python behind the first batch, beside the training thread: as long, that could run none
    of its own."""
    cpu_seconds: float | None = None
    """Computing of this rank's processes, validation included, as in those below."""
    cpu_queued_seconds: float | None = None
    """The training thread was ready and had to wait for a core."""
    helpers_seconds: float | None = None
    """Computing of all but the training thread: the loader's, above all."""
    helpers_queued_seconds: float | None = None
    """These were ready and had to wait for a core."""
    host_busy_seconds: float | None = None
    """Of all processes on the cores that this rank may use."""
    host_idle_seconds: float | None = None
    """The rest of these cores' time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What one rank measured in the last seconds; None for what could not be measured."""

    images: int
    """Images that it trained on. Over a run, each image counts once."""
    images_per_second: float | None = None
    """Training speed of this rank, validation excluded."""
    of_ceiling: float | None = None
    """That speed as a share of this rank's part of the ceiling."""
    loader_wait_fraction: float | None = None
    """Share of the time, validation excluded, in which the rank waited for the loader."""
    step_seconds: float | None = None
    """Forward, backward and optimiser; mean over steps."""
    own_step_seconds: float | None = None
    """The same without the wait for other ranks' gradients; None inside a CUDA graph, where that is not measured."""
    loss: float | None = None
    """Mean over images; on a GPU, those of the previous interval."""
    prepared_batches: int | None = None
    """See `Loader.prepared_batches`."""


Segment = Sequence[RankRecord]
"""The records of all ranks of one worker group, in order of rank."""


def segment_of(rows: Iterable[Mapping[str, Any]]) -> list[RankRecord]:
    """The records that these rows hold, as checkpoints and other ranks give them."""
    return [RankRecord(**row) for row in rows]


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
    options: Any = None,
    useful_block: Callable[[], int] = lambda: 0,
) -> dict[str, Any]:
    """A line of `epochs.jsonl`; what the arguments name is taken over as it is.

    Ranks run side by side, segments one after the other: a time is the sum over segments of the mean over ranks,
    but `seconds` of the slowest rank; images are sums.

    Args:
        segments: one for each worker group that ran a part of the epoch.
        ceiling_images_per_second: of the last segment's workers; it counts for no others, and one that the epoch itself
            disproves (`share_of_ceiling`) is none.
        options: of the job, a dataclass, for the verdict's remedies; None: there are none.
        useful_block: see `verdict`.
    """

    def seconds(name: str) -> float:
        return sum(fmean(getattr(record, name) for record in segment) for segment in segments)

    records = [record for segment in segments for record in segment]
    images = sum(record.images for record in records)
    wall = sum(max(record.seconds for record in segment) for segment in segments)
    first_batches = [record.first_batch_seconds for record in records if record.first_batch_seconds is not None]
    wait = seconds("loader_wait_seconds")
    rate = images / wall if wall else None
    if len({segment[0].world_size for segment in segments}) > 1:
        ceiling_images_per_second = None
    of_ceiling = share_of_ceiling(rate, ceiling_images_per_second)
    if rate and of_ceiling is None:
        ceiling_images_per_second = None
    line: dict[str, Any] = {
        "epoch": epoch,
        "step": step,
        "samples_consumed": samples_consumed,
        "world_size": segments[-1][0].world_size,
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
        "loss": sum(record.loss_sum for record in records) / images if images else None,
        "learning_rate": learning_rate,
        "validation": validation,
        "checkpoint_seconds": seconds("checkpoint_seconds"),
        "quarantined": quarantined,
        "verdict": None,
        "costs": None,
        "ranks": [asdict(record) for record in records],
    }
    try:
        found = verdict(line, options, useful_block)
        said = str(found)
    except Exception as error:  # what only speaks of a run must not end it
        warnings.warn(f"no verdict could be found: {type(error).__name__}: {error}", stacklevel=2)
        return line
    if found:
        line["verdict"], line["costs"] = said, found.costs
        if found.kind == "loader-bound":
            line["loader_images_per_second"] = rate
    return line
