"""Measures a run on one rank: its meter, live figures and traced steps, and the records of its epochs."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raydali.data.load.loader import Loader
from raydali.data.stream.class_mixing import useful_block
from raydali.launch.worker.step import RunParts
from raydali.measure.flops import peak_flops
from raydali.measure.meter import EpochMeter, LiveMetrics
from raydali.measure.records import epoch_record
from raydali.run.messages import EpochEnded
from raydali.training.profiling import StepTrace


class RunMeter:
    """The measurement of a run, on one rank. All ranks must call the same methods.

    Args:
        run: the parts of the run.
        loader: the loader of the training set.
        labels: labels of the training set, int64 (N,), if each sample has one.

    Attributes:
        meter, live: the meter of the current epoch, and its live figures.
        profiler: the profiler of the steps that `--profile-steps` names; None if none of them is left.
    """

    def __init__(self, run: RunParts, loader: Loader, labels: NDArray[np.int64] | None) -> None:
        self._run, worker = run, run.worker
        self._useful_block = cache(lambda: useful_block(labels, run.stream))
        peak = peak_flops(worker.device, run.precision.dtype)
        who: dict[str, Any] = {"rank": worker.rank, "world_size": worker.world_size, "node": worker.node}
        self.meter = EpochMeter(worker.device, **who, loader=loader, peak_flops=peak, group=run.session.group)
        self.meter.enter("loop")
        self.live = LiveMetrics(
            self.meter,
            batch_size=run.config.batch_size,
            micro_batches=run.micro_batches,
            publish=run.session.publish,
        )
        self._share_ceiling()
        self.profiler = self._new_profiler()

    def _share_ceiling(self) -> None:
        """Compare live figures with this rank's part of the ceiling."""
        ceiling, share = self._run.state.ceiling, self._run.micro_batches / self._run.stream.micro_batches_per_step
        self.live.ceiling_images_per_second = ceiling * share if ceiling else None

    def _new_profiler(self) -> StepTrace | None:
        session, asked = self._run.session, self._run.config.profiled
        if asked is None:
            return None
        done, end = session.cursor.done, self._run.stream.steps
        steps = range(max(asked.start, done), min(asked.stop, end))
        if not steps:
            if session.worker.rank == 0:
                named = f"--profile-steps {self._run.config.profile_steps}"
                session.warn(f"{named} traces nothing: only steps {done} to {end - 1} remain")
            return None
        profiler = StepTrace(steps, session.worker.rank, session.worker.device, session.folder.write)
        self.meter.on_stage = profiler.stage
        return profiler

    def end_epoch(self, epoch: int, validation: Mapping[str, Any] | None) -> dict[str, Any]:
        """Merge the measurements of all ranks into the epoch's record, for the next checkpoint and the driver.

        Args:
            epoch: its number.
            validation: its figures; None if the epoch is not validated.

        Raises:
            DataError: see `BrokenSamples.exchange`.
        """
        run, step = self._run, self._run.session.cursor.done
        run.broken.exchange()
        segments = run.state.gather(self.meter.record())
        self.live.end_epoch()
        record = epoch_record(
            segments,
            epoch=epoch,
            step=step,
            samples_consumed=run.stream.state(step)["samples_consumed"],
            learning_rate=run.learning_rate,
            validation=validation and {**validation, "broken": run.broken.in_validation()},
            quarantined=sum(of_rank.replaced for segment in segments for of_rank in segment),
            ceiling_images_per_second=run.state.ceiling,
            flops_per_image=run.state.flops_per_image,
            gpu_busy=run.state.gpu_busy,
            options=run.config,
            useful_block=self._useful_block,
        )
        run.state.add_epoch(record)
        run.session.emit_once(EpochEnded(record))
        return record

    def begin_epoch(self) -> None:
        """Measure the next epoch, for which the ceiling may be another one."""
        self._share_ceiling()
        self.meter.reset()
