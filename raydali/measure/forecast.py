"""The forecast of a whole run, from the records of a short one.

    run = start + steps x seconds of a step + validations + checkpoints + end

The first epoch of the short run has the costs of a start, the later ones have what every further step costs. For
another number of GPUs, a step has the measured time of its micro-batches, and an all-reduce around a ring of GPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from raydali.measure.account import accounts
from raydali.measure.memory import largest_batch

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of a run.

    Attributes:
        workers: their number in the forecast.
        samples, epochs, batch_size, global_batch_size, checkpoint_every: as in the run's settings.
        validations: the number of epochs that are validated.
        records: the rows of `epochs.jsonl` of the short run.
        before_placement, starting, ending: seconds before workers are held, until their first batch is awaited, and
            after the last step.
        kilowatts: of all GPUs of the short run; None if they are not measured.
        price: of a worker's hour, in USD; None if it is not given.
        weights_bytes: the size of the gradients that an all-reduce sums.
        bandwidth: assumed bytes a second of an all-reduce between GPUs; None: as measured, or else without limit.
    """

    workers: int
    samples: int
    epochs: int
    batch_size: int
    global_batch_size: int
    validations: int
    checkpoint_every: int
    records: Sequence[Record]
    before_placement: float
    starting: float
    ending: float
    kilowatts: float | None
    price: float | None
    weights_bytes: int
    bandwidth: float | None = None

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self.epochs * self.samples // self.global_batch_size

    @property
    def _later(self) -> Sequence[Record]:
        return self.records[1:] or self.records

    @cached_property
    def _first_seconds(self) -> float:
        """Seconds of the first batch, and those that the first step took longer."""
        return accounts(self.records[0], {})[-1].seconds.get("starting", 0.0)

    @cached_property
    def measured_step(self) -> tuple[float, float]:
        """Seconds of a step of the short run with all waits, and of these for the all-reduce."""
        trained = sum(each["seconds"] - each["checkpoint_seconds"] for each in self._later)
        ranks = [rank for each in self._later for rank in each["ranks"]]
        steps = sum(each["ranks"][0]["steps"] for each in self._later)
        exchanged = fmean((rank["exchange_seconds"] or 0.0) / max(1, rank["steps"]) for rank in ranks)
        if len(self.records) == 1:
            trained -= self._first_seconds
        return max(0.0, trained) / steps, exchanged

    @property
    def measured_workers(self) -> int:
        """The number of workers of the short run."""
        return int(self.records[-1]["world_size"])

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        whole, exchange = self.measured_step
        if self.workers == self.measured_workers:
            return whole
        # A global batch that was not given grows with the workers, and so does that of the short run.
        newest = self.records[-1]["ranks"]
        of_rank = newest[0]["images"] / newest[0]["steps"] / self.batch_size
        micro: float = (whole - exchange) / of_rank
        return micro * -(-self.global_batch_size // (self.batch_size * self.workers)) + self._exchange(exchange)

    def _exchange(self, measured: float) -> float:
        """Seconds of an all-reduce around a ring: each GPU sends and receives 2 (W - 1) / W of the gradients."""
        if self.bandwidth is not None:
            return 2 * (1 - 1 / self.workers) * self.weights_bytes / self.bandwidth
        return measured * (1 - 1 / self.workers) / (1 - 1 / self.measured_workers) if self.measured_workers > 1 else 0.0

    @property
    def validation_seconds(self) -> float:
        """Seconds of a whole validation, of which the short run may have seen a part."""
        seen = [each["validation"] for each in self._later if each["validation"] is not None]
        seen = seen or [each["validation"] for each in self.records if each["validation"] is not None]
        return fmean(map(self._whole_validation, seen)) if seen else 0.0

    def _whole_validation(self, seen: Record) -> float:
        of_rank = seen["all_samples"] / self.workers
        if seen["sample_seconds"] is None:  # a single batch
            return float(seen["seconds"] * max(1.0, of_rank / max(1, seen["samples"])))
        fixed = max(0.0, seen["seconds"] - seen["sample_seconds"] * seen["samples"])
        return float(fixed + seen["sample_seconds"] * of_rank)

    @property
    def checkpoint_seconds(self) -> float:
        """Seconds for which a checkpoint holds up the training."""
        every = self.checkpoint_every
        saved = [1 + (each["ranks"][0]["steps"] // every if every else 0) for each in self._later]
        return float(sum(each["checkpoint_seconds"] for each in self._later) / sum(saved))

    @property
    def epoch_seconds(self) -> float:
        """Mean seconds of an epoch, with its part of validations and checkpoints."""
        return (
            self.run_seconds - self.before_placement - self.starting - self._first_seconds - self.ending
        ) / self.epochs

    @property
    def run_seconds(self) -> float:
        """Seconds from the command to its end."""
        checkpoints = self.epochs + (self.steps // self.checkpoint_every if self.checkpoint_every else 0)
        within = self.steps * self.step_seconds + self.validations * self.validation_seconds
        start = self.before_placement + self.starting + self._first_seconds
        return start + within + checkpoints * self.checkpoint_seconds + self.ending

    @property
    def ceiling(self) -> float | None:
        """Images a second at the ceiling, in proportion to the workers; None if it was not measured."""
        known = [each["ceiling_images_per_second"] for each in self.records if each["ceiling_images_per_second"]]
        return known[-1] * self.workers / self.measured_workers if known else None

    def row(self, there: int) -> dict[str, Any]:
        """Return the row of the table; `there`: the number of GPUs of the cluster, 0 on CPUs."""
        held = self.run_seconds - self.before_placement
        at_ceiling = self.steps * self.global_batch_size / self.ceiling if self.ceiling else None
        on_gpus = self.records[-1]["ranks"][0]["device"] == "cuda"
        kilowatts = None if self.kilowatts is None else self.kilowatts * self.workers / self.measured_workers
        return {
            "workers": self.workers,
            "gpus": self.workers if on_gpus else 0,
            "global_batch_size": self.global_batch_size,
            "run_seconds": round(self.run_seconds, 1),
            "epoch_seconds": round(self.epoch_seconds, 2),
            "images_per_second": round(self.global_batch_size / self.step_seconds, 1),
            "goodput": None if at_ceiling is None else round(min(1.0, at_ceiling / held), 4),
            "kwh": None if kilowatts is None else round(kilowatts * held / 3600, 4),
            "cost_usd": None if self.price is None else round(self.price * held / 3600 * self.workers, 4),
            "estimated": self.workers > there if on_gpus else False,
            "bandwidth": self.bandwidth if self.workers != self.measured_workers else None,
        }

    def on(self, workers: int, bandwidth: float | None, *, grows: bool) -> "Forecast":
        """Return the forecast for another number of workers; `grows`: the global batch in proportion to it."""
        batch = self.global_batch_size * workers // self.workers if grows else self.global_batch_size
        return replace(self, workers=workers, global_batch_size=batch, bandwidth=bandwidth)

    def memory(self) -> dict[str, Any]:
        """Return the peak of a worker in bytes, and the largest micro-batch that fits; None where it is not known."""
        of_ranks = [rank["memory"] for rank in self.records[-1]["ranks"]]
        fits = [largest_batch(memory, self.batch_size) for memory in of_ranks]
        return {
            "memory_bytes": max(memory["peak"] + memory.get("others", 0) for memory in of_ranks),
            "memory_total_bytes": min((memory["total"] for memory in of_ranks if "total" in memory), default=None),
            "largest_batch_size": None if None in fits else min(filter(None, fits)),
        }
