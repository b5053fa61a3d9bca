"""A rank of `raydali bench train` and `strategies`: it joins the others, builds the step and measures segments.

    rehearsal                compile, tune, capture, before a loader exists
    ceiling before           the step on one resident batch of noise
    loader starts, one batch is taken
    each round:
      (the loader fills its queues, then idles)
      ceiling                the step on the resident batch, while the loader idles
      real                   the step on the loader's batches
      alone                  batches are taken and discarded

So drift affects all alike. A segment ends when this rank's stream has finished, not the whole device: it does not wait
for a loader that works ahead. Before segments with a loader, uncounted steps consume the batches in its queues.
"""

import gc
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench.loader import ImageTask, our_loader
from raydali.bench.loader_rates import Pixels
from raydali.bench.processes import join_ranks
from raydali.bench.train_step import Step, optimizer_step
from raydali.data.index.labeled import LabeledFiles

if TYPE_CHECKING:
    import torch

    from raydali.host.hardware import PrecisionName
    from raydali.training.forward_backward import ForwardBackward, Precision
    from raydali.training.worker import Worker

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""Images and labels."""
AWAKE_STEPS = {"cuda": 5, "cpu": 1}
"""Number of uncounted steps after a rest, until the clock rate is high again."""
REST_SECONDS = 0.5
MIN_CLASSES = 1000
"""Minimum number of classes of the model."""


@dataclass(frozen=True, kw_only=True)
class TrainTask(ImageTask):
    """A measurement of one combination of loader, model and settings; each process sets its own rank.

    Attributes:
        model: a name that `build_model` accepts.
        steps: number of micro-batches per segment.
        rounds: how often each segment is measured.
        precision: precision of the forward and the backward pass.
        strategy: how the gradients of several GPUs are averaged; "dp" is DataParallel in one process, "shard" FSDP2.
        recomputed: whether blocks compute their activations again in the backward pass.
        optimizer: that of the step.
        gpus: number of GPUs of all processes together; 0 means the CPU.
        compile, fused, cuda_graph: as in ForwardBackward; on GPUs only.
        overlap: as in ForwardBackward.
        micro_batches: number of micro-batches of each GPU in a step.
        segments: what is measured in each round.
    """

    model: str
    steps: int
    rounds: int
    precision: "PrecisionName"
    strategy: Literal["one", "dp", "ddp", "sync-bn", "shard"] = "ddp"
    recomputed: bool = False
    optimizer: Literal["sgd", "adamw"] = "sgd"
    gpus: int
    compile: bool = False
    fused: bool = False
    cuda_graph: bool = False
    overlap: bool | None = None
    micro_batches: int = 1
    segments: tuple[str, ...] = ("ceiling", "real", "alone")

    @property
    def plain_loop(self) -> bool:
        """Return whether training uses the usual loop: the default stream, kernels launched one by one."""
        return self.loader == "native"

    @property
    def layout(self) -> "torch.memory_format":
        """The layout of images and weights in memory.

        DataParallel's replicas get their weights as pieces of one buffer, at addresses that cuDNN's kernels for
        channels-last images cannot read from (misaligned address).
        """
        import torch

        return torch.contiguous_format if self.strategy == "dp" else torch.channels_last


class Feed:
    """A loader, configured for training.

    Attributes:
        resident: a batch of noise with the shapes, dtypes, strides and device of its batches.
        batches: endless pairs of images (N, 3, size, size) in the task's layout, and labels (N,) int64, on the device.
            The loader starts when the first one is requested.
        store: maximum number of batches that it prepares in advance.
    """

    def __init__(self, task: TrainTask, source: LabeledFiles, precision: "Precision") -> None:
        import torch

        half = task.gpu and precision.dtype != torch.float32
        # The other loaders deliver normalized floats, which autocast converts.
        formats: dict[str, Pixels] = {"native": "float16" if half else "float32", "torchvision": "float32"}
        pixels = formats.get(task.loader, "uint8")
        batch = our_loader(task, "synthetic", source, task.crops()).resident_batch(task.batch_size)
        images = batch["images"].to(getattr(torch, pixels))
        self.resident = images.contiguous(memory_format=task.layout), batch["labels"]
        self.store = {"torchvision": 2 * task.workers, "torch": task.threads}.get(task.loader, 2)
        if task.loader == "raydali":
            from raydali.data.load import depths

            self.store = depths.DECODED
        self.batches = _pairs(replace(task, pixels=pixels))


def _pairs(task: TrainTask) -> Generator[Pair, None, None]:
    from torch.utils.dlpack import from_dlpack

    for batch in task.batches():
        if task.loader == "native":  # like DALI's own iterator for PyTorch: the host waits for each batch
            images, labels = (from_dlpack(array.as_tensor()) for array in batch)
            images, labels = images.permute(0, 3, 1, 2), labels.squeeze(-1).long()
        elif task.loader == "torchvision":
            images, labels = batch
        else:
            images, labels = batch["images"], batch["labels"]
        yield images.contiguous(memory_format=task.layout), labels


def measure(task: TrainTask, rank: int, port: int) -> dict[str, Any] | None:
    """Measure the segments together with the other ranks; called once in a new process.

    Returns:
        On rank 0 a dict, on the others None:
            "ceiling_before": a measured segment, if the ceiling is measured,
            "rounds": a list of dicts of measured segments by name,
            "captured": whether forward and backward of the steps were a CUDA graph,
            "flops": the operations that an image needs, and "peak": those that all GPUs can do in a second; None on a
            CPU and without the ceiling,
            "memory": the most bytes that PyTorch had on a GPU; None on a CPU.
        A measured segment is a dict:
            "images_per_second": the sum of all ranks,
            "loader_wait_fraction": share of the time in which the device had no data, mean over ranks.
    """
    import torch

    from raydali.measure.flops import peak_flops
    from raydali.measure.memory import memory_of
    from raydali.training.forward_backward import Precision
    from raydali.training.worker import Worker

    task = replace(task, rank=rank)
    task.use_all_queues()
    join_ranks(rank, task.world_size, port)
    worker = Worker.join(torch.device(task.device), cpus=task.threads, node="local")
    if task.gpu and task.plain_loop:
        torch.cuda.set_stream(torch.cuda.default_stream(worker.device))
    torch.manual_seed(rank)  # so that torchvision's order differs between ranks; DDP broadcasts the weights of rank 0
    # DataParallel computes in new threads at each step, and cuDNN's tuning results belong to a thread.
    torch.backends.cudnn.benchmark = task.strategy != "dp"
    source = LabeledFiles.scan(task.root)
    precision = Precision(task.precision, worker.device)
    feed = Feed(task, source, precision)
    step, forward_backward = _make_step(task, feed, source, worker, precision)
    peak = peak_flops(worker.device, precision.dtype) if "ceiling" in task.segments else None
    flops = forward_backward.flops_per_image(*feed.resident) if peak else None
    segments = Segments(task, feed, step, worker)
    with closing(feed.batches):
        measured = segments.before(), [segments.round() for _ in range(task.rounds)]
    memory = worker.exchange(memory_of(worker.device)["peak"] if task.gpu else None)
    of_ranks = worker.gather(measured)
    if not of_ranks:
        return None

    def combine(segments: list[list[float]]) -> dict[str, float]:
        return {
            "images_per_second": sum(task.steps * task.batch_size / seconds for seconds, _ in segments),
            "loader_wait_fraction": sum(waited / seconds for seconds, waited in segments) / len(segments),
        }

    before = [segment for segment, _ in of_ranks if segment is not None]
    rounds = zip(*(rounds for _, rounds in of_ranks), strict=True)
    return {
        "ceiling_before": combine(before) if before else None,
        "rounds": [{name: combine([times[name] for times in ranks]) for name in task.segments} for ranks in rounds],
        "captured": forward_backward.is_captured,
        "flops": flops,
        "peak": flops and peak and peak * task.gpus,
        "memory": max(memory) if task.gpu else None,
    }


def _make_step(
    task: TrainTask, feed: Feed, source: LabeledFiles, worker: "Worker", precision: "Precision"
) -> tuple[Step, "ForwardBackward"]:
    import torch

    from raydali.training.batchnorm import with_sync_batchnorm
    from raydali.training.blocks import recomputed
    from raydali.training.checkpoint_file import local
    from raydali.training.models.classification import build_model
    from raydali.training.models.normalized import Normalized
    from raydali.training.weights.undrawn import draw_zeros, undrawn

    build = partial(build_model, task.model, max(MIN_CLASSES, len(source.classes)), task.image_size)
    model = (undrawn(build) if task.strategy == "shard" else build()).to(memory_format=task.layout)
    if task.recomputed:
        recomputed(model)
    sharding = None
    if task.strategy == "shard" and task.world_size > 1:
        from raydali.training.sharding import Sharding  # not before: it takes half a second

        sharding = Sharding(worker, worker.world_size, precision.dtype, several=task.micro_batches > 1)
        sharding.shard(model)
    model = model.to(worker.device)  # the buffers alone, if it is sharded
    for name, parameter in model.named_parameters() if task.strategy == "shard" else ():
        is_scale = parameter.dim() == 1 and not name.endswith("bias")
        # A host draws a billion weights in half a minute.
        torch.nn.init.normal_(local(parameter.detach()), mean=float(is_scale), std=0.02)
    draw_zeros([model])
    if task.strategy == "sync-bn":
        model = with_sync_batchnorm(model, worker.gradients, fused=task.compile and task.fused)
    images, _ = feed.resident
    trained: torch.nn.Module = Normalized(model).to(worker.device) if images.dtype == torch.uint8 else model
    if task.strategy == "dp":
        trained = torch.nn.DataParallel(trained, device_ids=list(range(task.gpus)))
    return optimizer_step(
        model,
        trained,
        worker,
        precision,
        compiled=task.compile and task.gpu,
        fused=task.fused,
        graph=task.cuda_graph and task.gpu and not task.plain_loop,
        overlap=task.overlap,
        micro_batches=task.micro_batches,
        sharding=sharding,
        optimizer=task.optimizer,
    )


Segment = tuple[float, float]
"""Times of a segment on one rank, in seconds: its length, and the device's wait for data."""


class Segments:
    """The measurement of segments on one rank. Every rank must call the same methods."""

    def __init__(self, task: TrainTask, feed: Feed, step: Step, worker: "Worker") -> None:
        self._task, self._feed, self._step, self._worker = task, feed, step, worker
        self._seconds_per_batch = 0.0

    def before(self) -> Segment | None:
        """Rehearse, measure the ceiling before a loader exists, then start the loader."""
        from raydali.training.forward_backward import WARM_UP_STEPS_OF_DDP

        # A CPU captures nothing, and tunes everything in the first step.
        for _ in range((WARM_UP_STEPS_OF_DDP + 1 if self._task.gpu else 1) * self._task.micro_batches):
            self._step(*self._feed.resident)
        ceiling = self._on_resident_batch() if "ceiling" in self._task.segments else None
        next(self._feed.batches)
        if not self._task.plain_loop:  # as raydali's jobs do
            gc.collect()
            gc.freeze()
        return ceiling

    def round(self) -> dict[str, Segment]:
        """Measure each segment once."""
        # Loaders fill their queues, and are idle then.
        time.sleep(max(REST_SECONDS, 2 * self._feed.store * self._seconds_per_batch))
        measure: dict[str, Callable[[], Segment]] = {
            "ceiling": self._on_resident_batch,
            "real": lambda: self._with_loader(lambda batch: self._step(*batch)),
            "alone": lambda: self._with_loader(lambda _: None),
        }
        segments = {name: measure[name]() for name in self._task.segments}
        if "alone" in segments:
            self._seconds_per_batch = max(self._seconds_per_batch, segments["alone"][0] / self._task.steps)
        return segments

    def _on_resident_batch(self) -> Segment:
        """Time steps on a batch that is on the device; the first ones after a rest do not count."""
        for _ in range(AWAKE_STEPS[self._worker.device.type]):
            self._step(*self._feed.resident)
        return self._timed(lambda: self._step(*self._feed.resident)), 0.0

    def _with_loader(self, use: Callable[[Pair], None]) -> Segment:
        """Time taking a batch and using it, once per step of a segment."""
        from raydali.measure.meter import StageClock

        for _ in range(self._feed.store + 1):
            use(next(self._feed.batches))
        clock = StageClock(self._worker.device)

        def body() -> None:
            clock.enter("loader_wait")
            batch = next(self._feed.batches)
            clock.enter("step")
            use(batch)

        seconds = self._timed(body)
        return seconds, clock.totals()["loader_wait"]

    def _timed(self, body: Callable[[], None]) -> float:
        self._finish()
        self._worker.barrier()
        began = time.perf_counter()
        for _ in range(self._task.steps):
            body()
        self._finish()
        return time.perf_counter() - began

    def _finish(self) -> None:
        if self._task.gpu:
            import torch

            torch.cuda.current_stream(self._worker.device).synchronize()
