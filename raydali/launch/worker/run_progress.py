"""The progress of a run: count steps, measure epochs, and report both to the driver."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.loading.loader import Loader
from raydali.data.stream.class_mixing import useful_block
from raydali.data.stream.stream import MicroBatch, Stream
from raydali.host import start_clock
from raydali.launch.options import TrainingOptions
from raydali.launch.worker.bad_samples import BrokenSamples
from raydali.launch.worker.checkpointing import RunState
from raydali.launch.worker.session import Session
from raydali.measure.live_metrics import LiveMetrics
from raydali.measure.meter import EpochMeter
from raydali.measure.records import epoch_record
from raydali.run.messages import EpochEnded
from raydali.run.sample_trace import SampleTrace
from raydali.train.profiling import StepTrace


class RunProgress:
    """The progress of a run, on one rank. All ranks must call the same methods.

    Args:
        labels: labels of the training set, int64 (N,), if each sample has one.
        peak_flops: the peak of this rank's device, operations a second; None if it is not known.

    Attributes:
        meter: the meter of the current epoch.
    """

    def __init__(
        self,
        config: TrainingOptions,
        session: Session,
        stream: Stream,
        state: RunState,
        broken: BrokenSamples,
        trace: SampleTrace | None,
        labels: NDArray[np.int64] | None,
        *,
        peak_flops: float | None = None,
    ) -> None:
        self._config, self._session, self._stream, self._state = config, session, stream, state
        self._broken, self._trace, self._worker = broken, trace, session.worker
        self._useful_block = cache(lambda: useful_block(labels, stream))
        self._cursor, self._peak_flops = session.cursor, peak_flops
        self.meter: EpochMeter
        self._live_metrics: LiveMetrics

    def new_meter(self, loader: Loader) -> EpochMeter:
        """Return a new meter for this rank."""
        worker = self._worker
        return EpochMeter(
            worker.device,
            rank=worker.rank,
            world_size=worker.world_size,
            node=worker.node,
            loader=loader,
            peak_flops=self._peak_flops,
        )

    def begin(self, loader: Loader) -> None:
        """Begin to measure; call it before the first step."""
        self.meter = self.new_meter(loader)
        self.meter.enter("loop")
        self._live_metrics = LiveMetrics(
            self.meter,
            batch_size=self._config.batch_size,
            micro_batches=self._micro_batches,
            ceiling_images_per_second=self._ceiling_of_rank(),
            prepared=lambda: loader.prepared_batches,
            publish=self._session.publish,
        )

    @property
    def _micro_batches(self) -> int:
        """The number of this rank's micro-batches of a global batch."""
        return self._stream.micro_batches_of(self._worker.rank, self._worker.world_size)

    def _ceiling_of_rank(self) -> float | None:
        share = self._micro_batches / self._stream.micro_batches_per_step
        return self._state.ceiling * share if self._state.ceiling else None

    def step_trace(self) -> StepTrace:
        """Return the profiler of the steps that `--profile-steps` names."""
        asked = self._config.profiled or range(0)
        steps = range(max(asked.start, self._cursor.done), min(asked.stop, self._stream.steps))
        if asked and not steps and self._worker.rank == 0:
            left = f"{self._cursor.done} to {self._stream.steps - 1}"
            self._session.warn(f"--profile-steps {self._config.profile_steps} traces nothing: only steps {left} remain")
        trace = StepTrace(steps, self._worker.rank, self._worker.device, self._session.folder.write)
        if steps:
            self.meter.on_stage = trace.stage
        return trace

    def finish_step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Count a step, record its samples, and report the progress to the driver.

        Raises:
            DataError: more samples are broken than `max_bad_fraction` allows; on all ranks at the same step.
        """
        self.meter.replaced += sum(micro_batch.replaced for micro_batch in micro_batches)
        if self._trace is not None:
            for micro_batch in micro_batches:
                self._trace.add(micro_batch)
        stream, cursor = self._stream, self._cursor
        cursor.done += 1
        self.meter.end_step()
        self._broken.after_step(cursor.done)
        if cursor.done == cursor.start + 1:
            start_clock.mark("first step")
            self._session.report_start(steps=stream.steps)
        self._session.report_progress(
            steps=stream.steps,
            epoch=stream.epoch_of(cursor.done - 1),
            epochs=self._config.epochs,
            samples_consumed=stream.state(cursor.done)["samples_consumed"],
        )
        self._live_metrics.step()

    def end_epoch(
        self, validation: Mapping[str, Any], learning_rate: float, flops_per_image: float | None
    ) -> dict[str, Any]:
        """Merge the measurements of all ranks into the epoch's record, for the next checkpoint and the driver.

        Returns:
            The record, on all ranks.
        """
        self._broken.exchange()
        segments = self._state.gather(self.meter.record())
        self._live_metrics.end_epoch()
        cursor, epoch = self._cursor, self._stream.epoch_closed_by(self._cursor.done - 1) or 0
        record = epoch_record(
            segments,
            epoch=epoch,
            step=cursor.done,
            samples_consumed=self._stream.state(self._cursor.done)["samples_consumed"],
            learning_rate=learning_rate,
            validation={**validation, "broken": self._broken.in_validation()},
            quarantined=sum(each.replaced for segment in segments for each in segment),
            ceiling_images_per_second=self._state.ceiling,
            flops_per_image=flops_per_image,
            options=self._config,
            useful_block=self._useful_block,
        )
        self._state.add_epoch(record)
        if self._worker.rank == 0:
            self._session.emit(EpochEnded(record))
        return record

    def begin_epoch(self) -> None:
        """Begin to measure the next epoch."""
        self._live_metrics.ceiling_images_per_second = self._ceiling_of_rank()
        self.meter.reset()
