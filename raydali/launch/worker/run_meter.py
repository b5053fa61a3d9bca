"""Measures a run on one rank: its meter, live figures and traced steps, the records of its epochs, and its metrics.

Ray exports the metrics to Prometheus with the prefix `ray_`, see docs/monitoring.md. It adds the suffix `_total` to
counters, and exports them until its metrics agent on the node ends. It drops a gauge 20 s after it was last set, so
gauges disappear after their rank has ended.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from ray.util.metrics import Counter, Gauge

from raydali.data.load.loader import Loader
from raydali.data.stream.class_mixing import useful_block
from raydali.errors import DivergedError
from raydali.launch.worker.step import RunParts
from raydali.measure.flops import peak_flops
from raydali.measure.meter import EpochMeter, LiveMetrics
from raydali.measure.records import Figures, RankRecord, epoch_record
from raydali.run.events import BadLoss
from raydali.run.find import name_of
from raydali.run.messages import EpochEnded
from raydali.training.bad_losses import WINDOW
from raydali.training.profiling import StepTrace

RANK_TAGS = ("run", "rank")
IMAGES = "raydali_images"
GAUGES = {
    "raydali_images_per_second": "Training speed of this rank, without validation.",
    "raydali_of_ceiling_ratio": "Training speed as a share of the ceiling: the speed with a batch on the device.",
    "raydali_loader_wait_ratio": "Share of the training time in which this rank waited for its loader.",
    "raydali_step_seconds": "Mean duration of a step since the last report: forward, backward, optimizer.",
    "raydali_own_step_seconds": "Duration of a step without the wait for other ranks' gradients.",
    "raydali_loss": "Mean loss over the images since the last report.",
    "raydali_loader_prepared_batches": "Batches prepared ahead, in the loader's last queue whose length can be read.",
    "raydali_host_memory_bytes": "Resident memory of this rank's process.",
    "raydali_gpu_memory_bytes": "GPU memory that PyTorch holds for this rank.",
}
"""The gauges of each rank, with their help texts."""


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
        self._bad_in_a_row = 0

    def _share_ceiling(self) -> None:
        """Compare live figures with this rank's part of the ceiling."""
        ceiling, share = self._run.state.ceiling, self._run.micro_batches / self._run.stream.micro_batches_per_step
        self.live.ceiling_images_per_second = ceiling * share if ceiling else None

    def _new_profiler(self) -> StepTrace | None:
        session, asked = self._run.session, self._run.config.profiled
        if asked is None:
            return None
        done, end = session.cursor.done, self._run.stream.end_step(self._run.config.most_epochs - 1)
        steps = range(max(asked.start, done), min(asked.stop, end))
        if not steps:
            if session.worker.rank == 0:
                named = f"--profile-steps {self._run.config.profile_steps}"
                session.warn(f"{named} traces nothing: only steps {done} to {end - 1} remain")
            return None
        profiler = StepTrace(steps, session.worker.rank, session.worker.device, session.folder.write)
        self.meter.on_stage = profiler.stage
        return profiler

    def end_epoch(self, epoch: int, learning_rate: float, validation: Mapping[str, Any] | None) -> dict[str, Any]:
        """Merge the measurements of all ranks into the epoch's record, for the next checkpoint and the driver.

        Args:
            epoch: its number.
            learning_rate: the learning rate of its last step.
            validation: its figures; None if the epoch is not validated.

        Raises:
            DataError: see `BrokenSamples.exchange`.
        """
        run, step = self._run, self._run.session.cursor.done
        run.broken.exchange()
        segments = run.state.gather(self.record())
        self.live.end_epoch()
        record = epoch_record(
            segments,
            epoch=epoch,
            step=step,
            samples_consumed=run.stream.state(step)["samples_consumed"],
            learning_rate=learning_rate,
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

    def record(self) -> RankRecord:
        """Return the meter's record, after all steps are judged. It waits for the device."""
        self.judge(wait=True)
        return self.meter.record()

    def judge(self, *, wait: bool = False) -> None:
        """Tell of bad steps that are newly known; with `wait` of all, for which it waits. All ranks must call it.

        Raises:
            DivergedError: a step is bad, and `--on-bad-loss` is stop; or WINDOW steps in a row are; on all ranks.
        """
        run, session, skips = self._run, self._run.session, self._run.watch.skips
        for step, loss, norm, is_bad in run.watch.judged(wait=wait):
            if run.trace is not None:
                run.trace.losses[step] = loss
            self._bad_in_a_row = self._bad_in_a_row + 1 if is_bad else 0
            if not is_bad or (self._bad_in_a_row > 1 and not skips):  # if weights are not finite, no loss is any more
                continue
            self.meter.left_out += skips * run.micro_batches * run.config.batch_size
            saved, command = session.cursor.saved, f"raydali replay {session.folder} --step {step}"
            session.checkpoints.protect(saved)
            facts: dict[str, Any] = {"step": step, "loss": loss, "gradient_norm": norm, "checkpoint": saved}
            why = f"its loss is {loss:.4g}" + ("" if norm is None else f" and its gradient norm {norm:.4g}")
            session.emit_once(BadLoss(**facts, why=why, left_out=skips, command=command))
            if run.config.on_bad_loss == "stop":
                skipping = "--on-bad-loss skip" + (" and without --shard" if run.config.shard else "")
                raise DivergedError(
                    f"step {step} is bad, {why}: see {command}; with {skipping}, the same command goes on from "
                    f"{name_of(saved) if saved else 'the start'} without it"
                )
            if self._bad_in_a_row == WINDOW:
                raise DivergedError(
                    f"{WINDOW} steps in a row were left out, up to step {step}, {why}: see {command}, correct the "
                    f"loss or the data, and give another --name"
                )

    def begin_epoch(self) -> None:
        """Measure the next epoch, for which the ceiling may be another one."""
        self._share_ceiling()
        self.meter.reset()


class RankMetrics:
    """The metrics of one rank.

    Args:
        run: the run's name.
        rank: the world rank.
        device: the device whose memory is reported.
    """

    def __init__(self, run: str, rank: int, device: torch.device) -> None:
        tags = {"run": run, "rank": str(rank)}
        self._device = device
        self._images = Counter(IMAGES, "Images that this rank trained on.", RANK_TAGS).set_default_tags(tags)
        self._images._record(0.0)  # Prometheus needs a 0 to see the first increment, and `inc` refuses 0
        self._gauges = {name: Gauge(name, text, RANK_TAGS).set_default_tags(tags) for name, text in GAUGES.items()}

    def publish(self, figures: Figures) -> None:
        """Set the metrics that were measured. It takes about 60 microseconds and does not wait for the device."""
        if figures.images:
            self._images.inc(figures.images)
        on_gpu = self._device.type == "cuda"
        for name, value in {
            "raydali_images_per_second": figures.images_per_second,
            "raydali_of_ceiling_ratio": figures.of_ceiling,
            "raydali_loader_wait_ratio": figures.loader_wait_fraction,
            "raydali_step_seconds": figures.step_seconds,
            "raydali_own_step_seconds": figures.own_step_seconds,
            "raydali_loss": figures.loss,
            "raydali_loader_prepared_batches": figures.prepared_batches,
            "raydali_host_memory_bytes": psutil.Process().memory_info().rss,
            "raydali_gpu_memory_bytes": torch.cuda.memory_reserved(self._device) if on_gpu else None,
        }.items():
            self._gauges[name].set(value)  # which ignores None
