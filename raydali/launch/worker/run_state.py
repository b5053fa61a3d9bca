"""Loads the state of a run from a checkpoint when it resumes, and saves it after the records that it covers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from raydali.data.read.storage import reason
from raydali.data.stream.stream import Stream
from raydali.errors import DivergedError, UsageError
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.rank_comparison import RankComparison
from raydali.launch.worker.session import Session
from raydali.measure.records import RankRecord, segment_of
from raydali.options.every_job import PLACEMENT_OPTIONS, TrainingOptions
from raydali.run.events import BadLoss
from raydali.run.folder import EPOCHS, EVENTS
from raydali.run.model_file import BestWeights, best_metric
from raydali.run.sample_trace import SampleTrace, drop_samples
from raydali.training.batchnorm import RunningStatistics
from raydali.training.checkpoint_file import Snapshot, Snapshots, is_finite, sharded_like
from raydali.training.checkpoint_parts import split
from raydali.training.evaluation.reference import Reference
from raydali.training.optim import load_optimizer
from raydali.training.worker import Worker

if TYPE_CHECKING:
    from raydali.training.sharding import Sharding

OPTIONS_WITHOUT_STEP_COST = PLACEMENT_OPTIONS | {
    "name",
    "checkpoint_every",
    "validate_every",
    "trace_samples",
    "loader",
    "ceiling",
    "shuffle_window",
    "shuffle_apart",
    "repeats",
    "class_sampling",
    "exclude",
    "max_bad_fraction",
    "val_data",
    "root",
}
"""Options that do not change the duration of a step if its batch is already on the device."""


class Stateful(Protocol):
    """Something that can be saved and loaded: a module, an optimizer, a gradient scaler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values; it may be empty."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Take over a state that `state_dict` returned."""
        ...


class RunState:
    """The state of a run on one rank. All ranks must call the same methods.

    Args:
        trace: the trace of samples, if there is one.
        sharding: what shards the model, if something does.
        ceiling_of: the conditions of a ceiling; a ceiling that was measured under other conditions is not used.
        ranks: compares the ranks before each checkpoint.

    Attributes:
        ceiling: images per second of all ranks together; None if it is not known.
        flops_per_image: see `measure.flops`; None if the operations are not counted yet.
        gpu_busy: see `Ceiling`.
        is_resumed: whether the run goes on from a checkpoint.
        parts: the parts of the state by their names in checkpoints; empty before `keep`.
        model, statistics: the model, and its BatchNorm statistics; see `keep`.
        snapshots: the copies of the state; see `Snapshots.before_update`.
        epochs, metric: what `run.early_end` takes; on rank 0.
    """

    model: nn.Module
    statistics: RunningStatistics

    def __init__(
        self,
        session: Session,
        stream: Stream,
        broken: BrokenSamples,
        trace: SampleTrace | None,
        ceiling_of: Mapping[str, str],
        ranks: RankComparison,
        sharding: "Sharding | None" = None,
    ) -> None:
        self._session, self._stream, self._broken, self._trace = session, stream, broken, trace
        self._sharding = sharding
        session.checkpoints.sharding = sharding
        self._worker, self._folder = session.worker, session.folder
        self._ceiling_of, self._ranks = dict(ceiling_of), ranks
        self._segments: list[list[RankRecord]] = []
        self._unwritten: list[dict[str, Any]] = []
        self.parts: dict[str, Stateful] = {}
        self.snapshots = Snapshots(self._worker.device)
        self._best: float | None = None
        self.epochs: list[dict[str, Any]] = []
        self.metric: str | None = None
        self._read: dict[str, Any] = {}
        self.is_resumed = False
        self.ceiling: float | None = None
        self.flops_per_image: float | None = None
        self.gpu_busy: float | None = None
        self._cursor = session.cursor
        self._resume()

    def _resume(self) -> None:
        checkpoint = self._session.checkpoints.newest()
        if checkpoint is not None:
            self._cursor.start = self._cursor.done = self._cursor.saved = self._stream.steps_of(checkpoint["stream"])
            self._segments = [segment_of(rows) for rows in checkpoint["segments"]]
            self._best = checkpoint["best"]
            if checkpoint["ceiling_of"] == self._ceiling_of:
                self.ceiling = checkpoint["ceiling"]
                self.flops_per_image = checkpoint["flops_per_image"]
                self.gpu_busy = checkpoint["gpu_busy"]
            self._read, self.is_resumed = checkpoint["state"], True
        with self._folder.must_answer():
            self._broken.resume((checkpoint or {}).get("quarantine", {}))
            self._broken.share_suspects()
            if self._worker.rank == 0:
                rows = self._folder.keep_rows(EPOCHS, lambda row: row["step"] <= self._cursor.start)
                self.epochs = [{name: row[name] for name in ("epoch", "validation")} for row in rows]
                self.metric = best_metric(self._folder)
                drop_samples(self._folder, self._cursor.start)
            events = self._folder.rows(EVENTS) if self._worker.rank == 0 else []
            for row in events:
                if row["event"] == BadLoss.event:
                    self._session.checkpoints.protect(row["checkpoint"])
            self._ranks.resume(events)
        self._worker.barrier()

    def keep(self, model: nn.Module, statistics: RunningStatistics, others: Mapping[str, Stateful]) -> None:
        """Load these parts if the checkpoint has them, and save them from now on; see TrainingRun.register_state.

        Args:
            model: the model.
            statistics: its BatchNorm statistics, which are averaged before the state is taken.
            others: the other parts by their names in checkpoints.
        """
        self.model, self.statistics, self.parts = model, statistics, {"model": model, **others}
        for name, part in self.parts.items():
            if (read := self._read.get(name)) is None:
                # An average begins with the weights after the next step; other networks may have none at all.
                if self.is_resumed and isinstance(part, nn.Module) and not isinstance(part, AveragedModel):
                    raise UsageError(f"the newest checkpoint has no weights of {name}: give another --name")
            elif isinstance(part, Optimizer):
                load_optimizer(part, read)
            elif read:  # a part may have had nothing to save
                now = part.state_dict()
                part.load_state_dict({key: sharded_like(now.get(key), value) for key, value in read.items()})
        self._read = {}

    def gather(self, record: RankRecord) -> list[list[RankRecord]]:
        """End an epoch: return the records of all ranks, one list for each worker group.

        Args:
            record: this rank's record since the last epoch ended or the worker group began.
        """
        segments = [*self._segments, segment_of(self._worker.exchange(asdict(record)))]
        self._segments.clear()
        return segments

    def add_epoch(self, record: dict[str, Any]) -> None:
        """Keep an epoch's record on rank 0 until it is written before the next checkpoint."""
        if self._worker.rank == 0:
            self._unwritten.append(record)
            self.epochs.append({name: record[name] for name in ("epoch", "validation")})

    def best_of(
        self, score: float, weights: nn.Module, *, metric: str, epoch: int, reference: Reference | None = None
    ) -> BestWeights | None:
        """Return the weights, not copied yet, if the score is the highest so far; otherwise None."""
        self.metric = metric
        is_best = not math.isnan(score) and (self._best is None or score > self._best)
        if self._sharding is not None:  # all ranks gather them, or none
            is_best = self._worker.from_first(is_best)
        if not is_best:
            return None
        self._best = score
        return BestWeights(weights.state_dict(), epoch, metric, score, reference)

    def save(
        self, measured: Callable[[], RankRecord], best: BestWeights | None, reference: Reference | None = None
    ) -> None:
        """Save a checkpoint of all completed steps, after the records that it covers are written.

        The state is copied and written while training goes on. If weights, momenta or averages are not finite, it is
        not written, and the session raises a DivergedError at a later step.

        Args:
            measured: returns this rank's record of the current epoch; it may wait for the device.
            best: see `best_of`.
            reference: samples of the validation of the epoch that ends here.

        Raises:
            NodeError, RuntimeError, DivergedError: see `RankComparison.check`.
        """
        done = self._cursor.done
        self._broken.exchange()
        self.statistics.average(self._worker)
        # Queued behind the last steps, before the host waits for these in `measured`.
        copy = self._copy(best) if self._worker.rank == 0 or self._sharding is not None else None
        checksum = self._ranks.checksum(self.parts.values())
        gathered = self._worker.gather((asdict(measured()), self._flush_trace()))
        self._ranks.check(checksum, done)
        saved, self._cursor.saved = self._cursor.saved, done
        save_error = next((why for _, why in gathered if why), "")
        if copy is None:
            self._session.commit(done, None)
            return
        if self._sharding is not None:
            save_error = self._worker.from_first(save_error)
        segments = [[asdict(record) for record in segment] for segment in self._segments]
        partial_epoch = [row for row, _ in gathered]
        if any(row["images"] for row in partial_epoch):
            segments.append(partial_epoch)
        state = {
            "state": copy.state["state"],
            "stream": self._stream.state(done),
            "quarantine": self._broken.state(),
            "segments": segments,
            "best": self._best,
            "ceiling": self.ceiling,
            "ceiling_of": self._ceiling_of,
            "flops_per_image": self.flops_per_image,
            "gpu_busy": self.gpu_busy,
        }
        if reference is not None:
            state["reference"] = reference.state
        self._session.commit(
            done,
            state,
            best=replace(best, state=copy.state["best"]) if best else None,
            save_error=save_error,
            before_writing=partial(self._complete, copy, done, saved),
            rows=copy.state["rows"],
        )

    def _copy(self, best: BestWeights | None) -> Snapshot:
        state, rows = split({name: part.state_dict() for name, part in self.parts.items()})
        modules = [part for part in self.parts.values() if isinstance(part, nn.Module)]
        if self._sharding is None:
            return self.snapshots.take({"state": state, "rows": rows, "best": best and best.state}, modules)
        whole = best and self._sharding.on_first(best.state)
        copy = self.snapshots.take({"state": state, "rows": rows}, modules)
        return replace(copy, state={**copy.state, "best": whole})

    def _complete(self, copy: Snapshot, done: int, saved: int) -> None:
        """Wait for the copy of the state, check it, and write the rows of epochs before the checkpoint.

        Args:
            copy: the state after `done` steps.
            done: number of steps that the checkpoint covers.
            saved: number of steps that the previous one covers.

        Raises:
            DivergedError: weights, momenta or averages are infinite or NaN, so that a run could not resume from them.
            OSError: a row cannot be written. The next checkpoint retries it.
        """
        copy.wait()
        parts = {**copy.state["state"], "rows": copy.state["rows"]}
        if bad := [name for name, part in parts.items() if not is_finite(part)]:
            what = "weights" if {"model", "rows"} & {*bad} else f"numbers of the {' and the '.join(bad)}"
            raise DivergedError(
                f"the {what} are not finite after step {done} (they were at step {saved}): lower "
                f"--learning-rate or raise --warmup-epochs, and give another --name"
            )
        while self._unwritten and self._unwritten[0]["step"] <= done:
            self._folder.append(EPOCHS, self._unwritten[0])
            del self._unwritten[0]

    def _flush_trace(self) -> str:
        """Write the trace of samples before a checkpoint; return the error, or an empty text."""
        try:
            if self._trace is not None:
                self._trace.flush()
        except OSError as error:
            return reason(error)
        return ""


def ceiling_conditions(config: TrainingOptions, worker: Worker) -> dict[str, str]:
    """Return the options, workers and device that a ceiling depends on. Under other conditions it is invalid."""
    options = {name: repr(value) for name, value in asdict(config).items() if name not in OPTIONS_WITHOUT_STEP_COST}
    device = worker.device
    threads = f"{torch.get_num_threads()} threads of a CPU"
    on = torch.cuda.get_device_name(device) if device.type == "cuda" else threads
    return options | {"world_size": str(worker.world_size), "on": on}
