"""This file has the options of every job besides the workers: storage, stream, fault tolerance and training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from raydali.data.read.node_cache.cache_entries import CacheOption
from raydali.data.stream.class_shares import ClassSampling, ClassShares, check_alone
from raydali.data.stream.stream import Stream
from raydali.errors import UsageError
from raydali.options.placement import AT_LEAST_0, AT_LEAST_1, Bounds, PlacementOptions, require
from raydali.report.tracking import parse_trackers
from raydali.run.folder import USUAL_STORAGE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LEAST_TIMEOUT = 10
_OTHERS_WAIT = 1.5
"""Ranks wait for each other for the longer timeout times this, so that the driver finds the culprit first."""
PLACEMENT_OPTIONS = {
    "workers",
    "cpus_per_worker",
    "gpu",
    "no_gpu",
    "storage",
    "data",
    "max_failures",
    "hang_timeout",
    "storage_timeout",
    "start_timeout",
    "keep_epochs",
    "compare_ranks",
    "patience",
    "stop_after",
    "profile_steps",
    "cache",
    "price",
    "track",
    "hw_decoder_load",
    "largest_image",
    "weights",
    "order_batch_size",
}
"""Options that a resume may change freely: they decide where it runs and to which point, not what it computes."""
MAX_PROFILED = 200
"""A trace of 200 steps takes some hundred MB, which is as much as a browser shows."""


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(PlacementOptions):
    """Base of a job's config, whose fields are the options of the command line."""

    smaller_data: ClassVar[str] = "images stored smaller"
    """Data that would cost less to read and decode, for the verdict's advice."""
    usual_inputs: ClassVar[Mapping[str, Any]] = {}
    """The usual inputs of the job's models, where they differ from `MODEL_INPUTS` of defaults.py."""

    storage: str = USUAL_STORAGE
    """Folder for all runs, shared by all nodes, or a URI such as s3://bucket/runs."""
    name: str | None = None
    """Name of the run. The same command with the same name resumes it. Default: a new name."""
    epochs: Annotated[int, AT_LEAST_1] = 90
    """Number of passes over the training samples."""
    batch_size: Annotated[int, AT_LEAST_1] = 256
    """Samples per micro-batch, which a device processes at once; auto: the most that fit into a GPU's memory, less a
    margin of 8 %, which takes two short runs to find. A resume may divide it, for more workers."""
    order_batch_size: tyro.conf.Suppress[tyro.conf.Fixed[int | None]] = None
    """Not an option: the batch size with which the run began, if a resume has divided it. The order depends on it."""
    global_batch_size: Annotated[int | None, AT_LEAST_1] = None
    """Samples per optimizer step, over all workers. Default: --batch-size times the maximum number of workers."""
    seed: int = 0
    """Seed of all random numbers: weights, order, crops."""
    shuffle_block: Annotated[int | None, AT_LEAST_0] = None
    """For slow disks: samples per block. Blocks are shuffled, then the samples of several blocks. 0: shuffle all
    samples. Default: 0, or for Parquet files whose row groups need blocks, some row groups; a resume keeps it."""
    shuffle_window: Annotated[int | None, AT_LEAST_0] = None
    """Number of blocks that are mixed, for --shuffle-block; 0: 16 random blocks. Default: enough to mix the classes
    well; a resume keeps it."""
    shuffle_apart: bool | None = None
    """Read each block in one worker only, with --shuffle-block: micro-batches of a step have blocks of their own.
    Default: only if the blocks were chosen for Parquet files; a resume keeps it."""
    repeats: Annotated[int, AT_LEAST_1] = 1
    """Repeated augmentation: each sample is used K times with other random numbers within K epochs, in different global
    batches. An epoch has as many samples as without, from a K-th of the data."""
    class_sampling: str | None = None
    """balanced: each class gets as many places of an epoch as the others; sqrt or sqrt:SHARE: classes below this share
    of the samples (default 0.001) get more. An epoch stays as long; a sample with several labels counts to the rarest.
    Default: each sample has one place."""
    validate_every: Annotated[int, AT_LEAST_1] = 1
    """Validate after every N-th epoch, and after the last one. Only these epochs can become the best weights."""
    patience: Annotated[int | None, AT_LEAST_1] = None
    """End the run when N validations in a row bring no better score. With a higher N it goes on. Default: no end."""
    stop_after: Annotated[int | None, AT_LEAST_1] = None
    """End after this number of epochs, on the course of the whole run: without the option, the same command goes on."""
    on_bad_loss: Literal["stop", "skip", "warn"] = "warn"
    """When the loss of a step is not finite, or exceeds the median of the last 64 steps by the median itself and 20
    median absolute deviations: warn and go on; skip: leave the global batch out; or stop the run. With skip and stop
    gradients that are not finite count, too."""
    shard: int | Literal["all"] | None = None
    """Shard weights, gradients and momenta over all workers, for models that are larger than a GPU; with a number N,
    over each group of N workers. Groups have equal copies."""
    sync_bn: bool = False
    """Compute BatchNorm statistics over all GPUs (SyncBatchNorm) instead of per GPU."""
    checkpoint_every: Annotated[int, AT_LEAST_0] = 0
    """Optimiser steps between checkpoints, in addition to one per epoch; 0: only one per epoch."""
    keep_epochs: Annotated[int, AT_LEAST_0] = 0
    """Keep the checkpoint of every N-th epoch permanently, in addition to the newest three; 0: only these three."""
    compare_ranks: bool = True
    """Compare the weights and momenta of all ranks before each checkpoint; if they differ, go back to the last one."""
    cache: str | None = None
    """DIR[:SIZE], a folder on a local disk of each node: samples of a bucket are kept there, shared out over the nodes,
    and read from the bucket once. Sizes such as 500G. Default without SIZE: the free space, less a margin."""
    trace_samples: bool = False
    """Record which rank trained on which sample at which step, in the folder samples/ of the run."""
    max_failures: Annotated[int, Bounds(least=-1)] = 3
    """Maximum consecutive failures without a new checkpoint, except preemptions and storage outages; -1: no limit. An
    error that would recur ends the run at once."""
    hang_timeout: Annotated[float, AT_LEAST_0] = 600
    """Seconds without progress after which a run restarts from its newest checkpoint; 0: no limit."""
    storage_timeout: Annotated[float, AT_LEAST_0] = 21600
    """Seconds of a storage outage after which the run ends; 0: no limit. Workers retry for 1 min, then restart after
    pauses of 30 s to 5 min."""
    start_timeout: Annotated[float, AT_LEAST_0] = 1800
    """Seconds from the start of the workers to the first step, compilation included, after which they are restarted; 0:
    no limit."""

    price: Annotated[float | None, AT_LEAST_0] = None
    """USD that an hour of a GPU costs, or of a worker without GPUs: the run's ledger then has its cost."""
    track: str | None = None
    """Trackers in addition to TensorBoard: mlflow, wandb, or mlflow,wandb. Their packages must be installed."""

    learning_rate: Annotated[float | None, Bounds(above=0)] = None
    """Peak learning rate, at the end of the warm-up. Default: chosen by the job."""
    warmup_epochs: float | None = None
    """Epochs of linear warm-up of the learning rate from zero. Default: 5, or a third of --epochs if that is less."""
    weight_decay: Annotated[float, AT_LEAST_0] = 5e-5
    """Weight decay; by default not of normalisation layers and biases."""
    precision: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    """Precision of forward and backward pass; weights stay in fp32. With fp64, which is slow, weights are in
    fp64: to compare runs. Default: bf16 if the hardware has it, else fp16 on GPUs, fp32 on CPUs; a resume keeps it."""
    compile: bool | None = None
    """Compile the model with torch.compile, which takes up to a minute per start. Default: on GPUs, in runs of at least
    10000 steps; a resume keeps it."""
    fused: bool | None = None
    """On GPUs, compute BatchNorm, addition and ReLU of compiled models in one operation, which reads and writes less.
    Default: with a CUDA graph; a resume keeps it."""
    cuda_graph: bool = True
    """On GPUs, replay forward and backward of each micro-batch as one CUDA graph."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the network's repeated blocks, and compute their activations again in the backward pass:
    less memory, and more time."""
    ceiling: bool = True
    """Measure the ceiling at the start: the speed of a step whose batch is already on the device. It takes seconds."""
    loader: Literal["dali", "torch", "synthetic"] | None = None
    """Loader: dali; torch (PyTorch's DataLoader); synthetic (one batch that stays on the device). Default: dali if it
    is installed, else torch."""
    profile_steps: str | None = None
    """Steps to profile: A:B writes a trace of steps A to B-1 of each rank to traces/, for ui.perfetto.dev."""
    exclude: str | None = None
    """File with samples to leave out, one path per line, as `raydali verify -o FILE` writes it."""
    max_bad_fraction: Annotated[float, Bounds(least=0, below=1)] = 0.001
    """Maximum share of samples that are broken and replaced before the run ends. One sample is always allowed, except
    with 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.trackers, self.profiled
        if self.cache is not None:
            CacheOption.parse(self.cache)
        if self.class_sampling is not None:
            ClassSampling.parse(self.class_sampling)
            check_alone(self.repeats, self.shuffle_block)
        if self.shuffle_window and not self.shuffle_block:
            raise UsageError(f"--shuffle-window {self.shuffle_window} counts blocks: also give --shuffle-block")
        for name in ("hang_timeout", "start_timeout"):
            if 0 < (timeout := getattr(self, name)) < LEAST_TIMEOUT:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be 0 or at least {LEAST_TIMEOUT}, not {timeout:g}: "
                    "workers report progress every 2 s"
                )
        require(self, "warmup_epochs", least=0, below=self.epochs)
        require(self, "stop_after", most=self.epochs)
        if isinstance(self.shard, int) and self.shard < 2:
            raise UsageError(
                f"--shard {self.shard} must be at least 2 workers: leave the number out to shard over all of them"
            )
        if self.shard is not None and self.on_bad_loss == "skip":
            raise UsageError("--shard cannot leave out a global batch, as --on-bad-loss skip does: give warn or stop")
        if self.shard is not None and self.precision == "fp16":
            raise UsageError("--shard cannot scale losses, which --precision fp16 needs: give bf16 or fp32")
        if self.fused and self.compile is False:
            raise UsageError(
                "--fused needs --compile, which puts fused operations into the model: give both, or neither"
            )

    @property
    def group_timeout(self) -> timedelta:
        """Timeout of process groups: longer than the driver's timeouts, or a day if one of those is off."""
        if not self.hang_timeout or not self.start_timeout:
            return timedelta(days=1)
        return timedelta(seconds=_OTHERS_WAIT * max(self.hang_timeout, self.start_timeout))

    @cached_property
    def trackers(self) -> tuple[str, ...]:
        """The names in `track`.

        Raises:
            UsageError: an unknown name, or a package that is not installed.
        """
        return parse_trackers(self.track)

    @property
    def most_epochs(self) -> int:
        """Number of epochs after which this command ends at the latest."""
        return self.stop_after or self.epochs

    def sharded_over(self, workers: int) -> int:
        """Return over how many of so many workers a model is sharded; 1: each has the whole."""
        return workers if self.shard == "all" else self.shard or 1

    def validates(self, epoch: int) -> bool:
        """Return whether this epoch ends with a validation."""
        return (epoch + 1) % self.validate_every == 0 or epoch == self.epochs - 1

    def kept_steps(self, samples: int) -> Callable[[int], bool]:
        """Return whether the checkpoint after a step is kept permanently (`keep_epochs`)."""
        stream, every = self.stream(samples), self.keep_epochs

        def is_kept(step: int) -> bool:
            epoch = stream.epoch_closed_by(step - 1) if every and step else None
            return epoch is not None and (epoch + 1) % every == 0

        return is_kept

    def stream(self, samples: int, labels: "NDArray[np.int64] | None" = None) -> Stream:
        """The stream of ids that a run over that many training samples consumes.

        Args:
            samples: N.
            labels: (N,), the classes for --class-sampling; without them, the stream has the right length only.

        Raises:
            UsageError: the sizes do not fit together.
        """
        assert self.global_batch_size is not None, "the driver fills it in"
        return Stream(
            samples=samples,
            epochs=self.epochs,
            batch_size=self.batch_size,
            global_batch_size=self.global_batch_size,
            seed=self.seed,
            shuffle_block=self.shuffle_block or 0,
            shuffle_window=self.shuffle_window or 0,
            shuffle_apart=self.shuffle_apart or False,
            repeats=self.repeats,
            order_batch_size=self.order_batch_size,
            class_shares=None if labels is None else self._class_shares(labels),
        )

    def _class_shares(self, labels: "NDArray[np.int64]") -> ClassShares | None:
        sampling = self.class_sampling
        return None if sampling is None else ClassShares(labels, ClassSampling.parse(sampling), self.seed)

    @cached_property
    def profiled(self) -> range | None:
        """The steps in `profile_steps`.

        Raises:
            UsageError: no such range, or one of too many steps.
        """
        if self.profile_steps is None:
            return None
        try:
            first, _, end = self.profile_steps.partition(":")
            steps = range(int(first), int(end))
        except ValueError:
            steps = range(0)
        if not 0 < len(steps) <= MAX_PROFILED or steps.start < 0:
            raise UsageError(
                f"--profile-steps must be A:B with A below B and at most {MAX_PROFILED} steps, such as 100:110, not "
                f"{self.profile_steps}"
            )
        return steps

    @property
    def warmup(self) -> float:
        """Share of the run over which the learning rate rises."""
        return (min(5, self.epochs / 3) if self.warmup_epochs is None else self.warmup_epochs) / self.epochs


@dataclass(frozen=True, kw_only=True)
class ImageOptions(TrainingOptions):
    """Options of jobs whose images a GPU may decode."""

    hw_decoder_load: float = 1.0
    """On GPUs, share of the supported JPEGs that the hardware decoder decodes; CUDA cores decode the rest. 1 is fastest
    on H100 and H200."""
    largest_image: tuple[int, int] = (640, 640)
    """On GPUs, height and width in pixels for which decoding buffers are allocated at the start. Larger images cause
    stalls while buffers grow."""

    @property
    def decoding(self) -> dict[str, Any]:
        """The decoding options that the job's pipelines take."""
        return {"hw_decoder_load": self.hw_decoder_load, "largest_image": self.largest_image}
