"""The options of every job: placement, storage, stream, fault tolerance and training."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import tyro

from raydali.data.stream.stream import Stream
from raydali.errors import UsageError
from raydali.report.tracking import parse_trackers

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
    "profile_steps",
    "track",
    "hw_decoder_load",
    "largest_image",
}
"""Options that a resume may change freely: they say where it runs, not what."""
MAX_PROFILED = 200
"""A trace of 200 steps takes some hundred MB, which is as much as a browser shows."""


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Base of a job's config, whose fields are the options of the command line."""

    workers: str | None = None
    """Workers: a number, or MIN:MAX to grow and shrink with the cluster. Default: one a GPU, or 2 on CPUs."""
    cpus_per_worker: int | None = None
    """CPU cores of each worker. Default: the cores that a GPU has, or an equal share."""
    gpu: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Refuse to train without GPUs. Default: on GPUs where the cluster has any, else on CPUs."""
    no_gpu: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Train on CPUs, even where there are GPUs."""
    storage: str = "~/raydali-runs"
    """Where runs are kept: a folder that all nodes see, or a URI such as s3://bucket/runs."""
    name: str | None = None
    """Name of the run; the same command with the same name resumes it. Default: a new one."""
    epochs: int = 90
    """Passes over the training samples."""
    batch_size: int = 256
    """Samples of a micro-batch, which a device processes at once."""
    global_batch_size: int | None = None
    """Samples of an optimiser step, over all workers. Default: batch size x the largest number of workers."""
    seed: int = 0
    """Seed of everything random: weights, order, crops."""
    shuffle_block: int = 0
    """For slow disks: shuffle blocks of as many neighbouring samples, and the samples of a window of blocks; 0: all
    samples."""
    shuffle_window: int | None = None
    """Blocks of a window, spread over the data; 0: 16, drawn from anywhere. Default: by the labels, so that a global
    batch holds nearly the classes that it would without blocks. Kept from the first start on."""
    sync_bn: bool = False
    """Compute BatchNorm over the micro-batches of all GPUs instead of each GPU's own."""
    checkpoint_every: int = 0
    """Steps between checkpoints, in addition to those at the end of each epoch; 0: none."""
    keep_epochs: int = 0
    """Keep the checkpoint of every Nth epoch for good, in addition to the newest three; 0: none."""
    trace_samples: bool = False
    """Record which rank trained on which sample at which step, in the run's samples/."""
    max_failures: int = 3
    """Consecutive failures without a newer checkpoint after which the run ends; -1: no limit. Preemptions and storage
    outages do not count. A failure that would recur ends the run at once."""
    hang_timeout: float = 600
    """Seconds without progress after which a run is restarted from the newest checkpoint; 0: never."""
    storage_timeout: float = 21600
    """Seconds for which data or checkpoints may be unreachable before the run ends; 0: no limit. Workers retry for a
    minute, then restart after pauses of 30 s to 5 min."""
    start_timeout: float = 1800
    """Seconds that a worker group may take to its first step, compilation included, before it is restarted; 0: no
    limit."""

    track: str | None = None
    """Trackers in addition to TensorBoard, if they are installed: mlflow, wandb, or mlflow,wandb."""

    def __post_init__(self) -> None:
        _ = self.worker_range, self.trackers
        if self.gpu and self.no_gpu:
            raise UsageError("--gpu and --no-gpu exclude each other: give at most one of them")
        for name in ("cpus_per_worker", "epochs", "batch_size", "global_batch_size"):
            require(self, name, least=1)
        require(self, "checkpoint_every", least=0)
        require(self, "keep_epochs", least=0)
        require(self, "shuffle_block", least=0)
        require(self, "shuffle_window", least=0)
        if self.shuffle_window and not self.shuffle_block:
            raise UsageError(f"--shuffle-window {self.shuffle_window} counts blocks: give --shuffle-block too")
        require(self, "max_failures", least=-1)
        require(self, "storage_timeout", least=0)
        for name in ("hang_timeout", "start_timeout"):
            require(self, name, least=0)
            if 0 < (timeout := getattr(self, name)) < LEAST_TIMEOUT:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be 0 or at least {LEAST_TIMEOUT}, not {timeout:g}: "
                    "workers report progress every 2 s"
                )

    @cached_property
    def worker_range(self) -> tuple[int, int] | None:
        """(minimum, maximum) of workers, or None where not asked for.

        Raises:
            UsageError: no such range.
        """
        if self.workers is None:
            return None
        try:
            low, _, high = self.workers.partition(":")
            minimum, maximum = int(low), int(high or low)
        except ValueError:
            raise UsageError(f"--workers must be a number or MIN:MAX, such as 4 or 2:8, not {self.workers}") from None
        if not 1 <= minimum <= maximum:
            raise UsageError(f"--workers must be at least 1, and MIN at most MAX, not {self.workers}")
        return minimum, maximum

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

    def kept_steps(self, samples: int) -> Callable[[int], bool]:
        """Return whether the checkpoint after a step is kept for good (`keep_epochs`)."""
        stream, every = self.stream(samples), self.keep_epochs

        def is_kept(step: int) -> bool:
            epoch = stream.epoch_closed_by(step - 1) if every and step else None
            return epoch is not None and (epoch + 1) % every == 0

        return is_kept

    def stream(self, samples: int) -> Stream:
        """The stream of ids that a run over that many training samples consumes.

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
            shuffle_block=self.shuffle_block,
            shuffle_window=self.shuffle_window or 0,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(LaunchOptions):
    """Options of jobs that train a network by steps of an optimiser."""

    smaller_data: ClassVar[str] = "images stored smaller"
    """What would cost less to read and decode: the verdict's advice."""

    learning_rate: float | None = None
    """The highest learning rate, at the end of the warm-up. Default: the job's own."""
    warmup_epochs: float | None = None
    """Epochs over which the learning rate rises from zero. Default: 5, or a third of few epochs."""
    weight_decay: float = 5e-5
    """Of all parameters but norms' and biases'."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Precision of the forward and backward pass; weights are kept in fp32. Default: the fastest one where the run
    begins, kept from then on: bf16 on GPUs from Ampere on, and CPUs with AVX512-bf16 or AMX; fp16 on older GPUs, fp32
    on CPUs."""
    compile: bool | None = None
    """Compile the model with torch.compile. Default: on GPUs, in runs of at least 10000 steps: it takes up to a minute
    at each start, and makes ResNet-50 40 % faster. Kept from the first start on."""
    cuda_graph: bool = True
    """On GPUs, replay forward and backward as one CUDA graph, where a worker takes one micro-batch a step."""
    ceiling: bool = True
    """Measure at the start how fast a step is when its batch lies on the device already: seconds."""
    loader: Literal["dali", "torch", "synthetic"] = "dali"
    """dali; torch (torch's DataLoader, the baseline); synthetic (one resident batch, the ceiling)."""
    profile_steps: str | None = None
    """A:B writes what each rank does in steps A..B-1 of the run to traces/, for ui.perfetto.dev."""
    exclude: str | None = None
    """File of samples to leave out, as `raydali verify -o FILE` writes it: a path a line."""
    max_bad_fraction: float = 0.001
    """Share of the samples that may turn out to be broken, and be replaced, before the run stops; one always may, but
    for 0: then none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.profiled
        require(self, "learning_rate", above=0)
        require(self, "warmup_epochs", least=0, below=self.epochs)
        require(self, "weight_decay", least=0)
        require(self, "max_bad_fraction", least=0, below=1)

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
    """On GPUs, share of the JPEGs that the hardware decoder gets, of those that it knows; the rest goes to the other
    cores. All of them is fastest on an H100 and an H200; on other GPUs less may be."""
    largest_image: tuple[int, int] = (640, 640)
    """On GPUs, height and width for which decoding buffers are set aside at the start; the first larger images hold the
    GPU up while room is made for them."""

    @property
    def decoding(self) -> dict[str, Any]:
        """The decoding options that the job's pipelines take."""
        return {"hw_decoder_load": self.hw_decoder_load, "largest_image": self.largest_image}


def require(
    options: object, name: str, *, least: float | None = None, above: float | None = None, below: float | None = None
) -> None:
    """Refuse a numeric option outside its range; one that was not given (None) passes.

    Raises:
        UsageError: naming the option, its value and the range.
    """
    value = getattr(options, name)
    if value is None:
        return
    bounds = [(least, "at least", operator.ge), (above, "above", operator.gt), (below, "below", operator.lt)]
    if not all(holds(value, bound) for bound, _, holds in bounds if bound is not None):
        wanted = " and ".join(f"{word} {bound}" for bound, word, _ in bounds if bound is not None)
        raise UsageError(f"--{name.replace('_', '-')} must be {wanted}, not {value}")
