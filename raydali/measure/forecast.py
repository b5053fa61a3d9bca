"""The forecast of a whole run, from the records of a short one.

    run = start + steps x seconds of a step + validations + checkpoints + end

The first epoch of the short run has the costs of a start, the later ones have what every further step costs. For
another number of GPUs, a step has the measured time of its micro-batches, and an all-reduce around a ring of GPUs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from raydali.measure.memory import MARGIN, largest_batch

Record = Mapping[str, Any]
OF_START = "start-up", "compile"
"""The causes of costs that later epochs do not have."""
OF_LENGTH = "checkpoints", "validation", "short epochs"
"""The verdicts that depend on the length of an epoch, which a short run ends early."""


class Measured:
    """The measurements of a short run, in seconds.

    Args:
        records: its rows of `epochs.jsonl`.
        batch_size: of a micro-batch.
        checkpoint_every: see the option.
        costs: of a step in each epoch of the run, if images have other sizes in later epochs, see `SizesRehearsed`.

    Attributes:
        workers: their number.
        on_gpus: whether they have GPUs.
        start_extra_seconds: of the first batch, and by which the first step and the first validation took longer than
            later ones.
        step, exchange: a mean step of the run with all waits, and the part of its all-reduce.
        micro_batches: of a worker in a step.
        checkpoint: for which a checkpoint after the first epoch holds up the training.
        typical: the newest of the later records with the most steps.
        ceiling: images a second, mean of the run; None if it was not measured.
        memory_bytes, memory_total_bytes: the peak of a worker, and what its GPU has; None on a CPU.
        largest_batch_size: the largest micro-batch that fits; None on a CPU.
    """

    def __init__(
        self, records: Sequence[Record], batch_size: int, checkpoint_every: int, costs: Sequence[float] = ()
    ) -> None:
        def times(row: Record) -> float:  # as long as a step of its epoch takes a mean one
            return fmean(costs) / costs[row["epoch"]] if costs else 1.0

        later, newest = records[1:] or records, records[-1]["ranks"]
        self.workers, self.on_gpus = len(newest), newest[0]["device"] == "cuda"
        whole = records[0]["seconds"] + ((records[0]["validation"] or {}).get("seconds") or 0.0)
        self.start_extra_seconds = whole * sum(
            (records[0]["costs"] or {}).get(cause, 0.0) for cause in ("start-up", "compile")
        )
        steps = sum(row["ranks"][0]["steps"] for row in later)
        started = self.start_extra_seconds if len(records) == 1 else 0.0
        trained = sum(times(row) * max(0.0, row["seconds"] - row["checkpoint_seconds"] - started) for row in later)
        self.step: float = trained / steps
        ranks = [rank for row in later for rank in row["ranks"]]
        self.exchange = fmean((rank["exchange_seconds"] or 0.0) / max(1, rank["steps"]) for rank in ranks)
        self.micro_batches: float = newest[0]["images"] / newest[0]["steps"] / batch_size
        saved = len(later) + (steps // checkpoint_every if checkpoint_every else 0)
        self.checkpoint = sum(row["checkpoint_seconds"] for row in records[1:]) / saved
        self.typical = max(reversed(later), key=lambda row: int(row["ranks"][0]["steps"]))
        with_ceiling = [row for row in records if row["ceiling_images_per_second"]]
        ceilings = [row["ceiling_images_per_second"] / times(row) for row in with_ceiling]
        self.ceiling: float | None = ceilings[-1] if ceilings else None
        validations = [row["validation"] for row in records if row["validation"] is not None]
        self._validations = validations[-len(later) :]
        for seen in validations[: -len(later)]:
            self.start_extra_seconds += max(0.0, seen["seconds"] - self._validated(seen["samples"]))
        memory = [rank["memory"] for rank in newest]
        self.memory_bytes = max(usage["peak"] + usage.get("others", 0) for usage in memory)
        self.memory_total_bytes = min((usage["total"] for usage in memory if "total" in usage), default=None)
        fits = [largest_batch(usage, batch_size) for usage in memory]
        self.largest_batch_size = None if None in fits else min(filter(None, fits))

    def validation(self, workers: int) -> float:
        """Return the time of a whole validation by so many workers, of which the short run may have seen a part."""
        return self._validated(self._validations[-1]["all_samples"] / workers) if self._validations else 0.0

    def _validated(self, samples: float) -> float:
        times = []
        for seen in self._validations:
            if (pace := seen["sample_seconds"]) is None:  # a single batch
                times.append(seen["seconds"] * max(1.0, samples / max(1, seen["samples"])))
            else:
                times.append(max(0.0, seen["seconds"] - pace * seen["samples"]) + pace * samples)
        return fmean(times)

    def step_of(self, workers: int, micro_batches: int, weights_bytes: int, bandwidth: float | None) -> float:
        """Return the time of a step of so many workers, each with so many micro-batches.

        Around a ring, each GPU sends 2 (W - 1) / W of the gradients.

        Args:
            workers: W, their number.
            micro_batches: of each worker.
            weights_bytes: the size of the gradients.
            bandwidth: bytes a second of an all-reduce; None: as measured; with one worker, an all-reduce takes no time.
        """
        if workers == self.workers and micro_batches == self.micro_batches:
            return self.step
        sent, before = 2 * (1 - 1 / workers), 2 * (1 - 1 / self.workers)
        measured = self.exchange * sent / before if before else 0.0
        exchange = measured if bandwidth is None else sent * weights_bytes / bandwidth
        return (self.step - self.exchange) / self.micro_batches * micro_batches + exchange


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecasts of a run for several numbers of workers.

    Attributes:
        samples, epochs, batch_size, checkpoint_every: as in the run's settings.
        validations: the number of epochs that are validated.
        measured: by a short run.
        before_placement, starting, ending: seconds before workers are held, until their first batch is awaited, and
            after the last step.
        starting_joules, watts: of all GPUs of the short run until their first batch is awaited, and after it; None if
            they are not measured.
        price: of a worker's hour, in USD; None if it is not given.
        weights_bytes, bandwidth: see `Measured.step_of`.
        state_bytes: whole weights, momenta and averages.
        sharded_over: returns over how many of so many workers they are sharded; 1: each has the whole.
    """

    samples: int
    epochs: int
    batch_size: int
    checkpoint_every: int
    validations: int
    measured: Measured
    before_placement: float
    starting: float
    ending: float
    starting_joules: float | None
    watts: float | None
    price: float | None
    weights_bytes: int
    bandwidth: float | None = None
    state_bytes: int = 0
    sharded_over: Callable[[int], int] = lambda _: 1

    def _steps_and_checkpoints(self, global_batch_size: int) -> tuple[int, int]:
        steps = self.epochs * self.samples // global_batch_size
        return steps, self.epochs + (steps // self.checkpoint_every if self.checkpoint_every else 0)

    def costs(self, global_batch_size: int) -> dict[str, float]:
        """Return the seconds that each cause costs a run of the short run's workers, without the start's seconds."""
        record, (steps, checkpoints) = self.measured.typical, self._steps_and_checkpoints(global_batch_size)
        whole = record["seconds"] + ((record["validation"] or {}).get("seconds") or 0.0)
        times = steps * self.measured.step * whole / (record["seconds"] - record["checkpoint_seconds"])
        seconds = {cause: share * times for cause, share in (record["costs"] or {}).items() if cause not in OF_START}
        seconds["checkpoint"] = checkpoints * self.measured.checkpoint
        seconds["validation"] = self.validations * self.measured.validation(self.measured.workers)
        return seconds

    def memory_of(self, workers: int, micro_batches: int) -> int:
        """Return the most bytes that one of so many workers needs, each with so many micro-batches in a step.

        It is as measured, with other parts of weights, momenta and averages. Parts of gradients may not be in the peak,
        so smaller ones save nothing. Between micro-batches, whole weights and gradients stay in the memory.
        """
        measured = self.measured
        over, before = self.sharded_over(workers), self.sharded_over(measured.workers)
        more = 1 / over - 1 / before
        stays = over > 1 and micro_batches > 1 and (before == 1 or measured.micro_batches <= 1)
        gradients = (max(0.0, more) + 2 * stays) * self.weights_bytes
        return int(measured.memory_bytes + more * self.state_bytes + gradients)

    def row(self, workers: int, global_batch_size: int) -> dict[str, Any]:
        """Return the forecast for so many workers and this global batch, with the names of `raydali plan --json`."""
        measured = self.measured
        steps, checkpoints = self._steps_and_checkpoints(global_batch_size)
        micro_batches = -(-global_batch_size // (self.batch_size * workers))
        step = measured.step_of(workers, micro_batches, self.weights_bytes, self.bandwidth)
        epochs = steps * step + self.validations * measured.validation(workers) + checkpoints * measured.checkpoint
        held = self.starting + measured.start_extra_seconds + epochs + self.ending
        ceiling = measured.ceiling and measured.ceiling * workers / measured.workers
        kwh, memory, total = None, self.memory_of(workers, micro_batches), measured.memory_total_bytes
        if self.starting_joules is not None and self.watts is not None:
            kwh = (self.starting_joules + self.watts * (held - self.starting)) / 3.6e6 * workers / measured.workers
        return {
            "workers": workers,
            "gpus": workers if measured.on_gpus else 0,
            "global_batch_size": global_batch_size,
            "run_seconds": round(self.before_placement + held, 1),
            "epoch_seconds": round(epochs / self.epochs, 2),
            "images_per_second": round(global_batch_size / step, 1),
            "goodput": round(min(1.0, steps * global_batch_size / ceiling / held), 4) if ceiling else None,
            "kwh": None if kwh is None else round(kwh, 4),
            "cost_usd": None if self.price is None else round(self.price * held / 3600 * workers, 4),
            "estimated": measured.on_gpus and workers > measured.workers,
            "bandwidth": None if workers == measured.workers else self.bandwidth,
            "sharded_over": self.sharded_over(workers),
            "memory_bytes": memory,
            "fits": None if total is None else memory <= max(measured.memory_bytes, (1 - MARGIN) * total),
        }
