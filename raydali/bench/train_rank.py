"""A rank of `raydali bench train`: it joins the others, builds the step and measures segments, interleaved.

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
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raydali.bench.image_loaders import LOADERS, Pixels, Task, our_loader
from raydali.bench.processes import join_ranks
from raydali.data.sources.labeled import LabeledFiles
from raydali.data.tasks.classification import TrainImages
from raydali.host import hardware

if TYPE_CHECKING:
    import torch

    from raydali.host.hardware import PrecisionName
    from raydali.train.step import Precision
    from raydali.train.worker import Worker

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""Images and labels."""
Step = Callable[["torch.Tensor", "torch.Tensor"], None]
"""One optimizer step on images and labels."""
AWAKE_STEPS = {"cuda": 5, "cpu": 1}
"""Number of uncounted steps after a rest, until the clock rate is high again."""
REST_SECONDS = 0.5
MIN_CLASSES = 1000
"""Minimum number of classes of the model."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """A measurement of one combination of loader, model and settings, which is the same on all ranks.

    Attributes:
        loading: the loader, its settings and the number of ranks; each process sets its own rank.
        model: a name that `build_model` accepts.
        steps: steps per segment.
        rounds: how often each segment is measured.
        precision: precision of the forward and the backward pass.
        compile, fused, cuda_graph: as in ForwardBackward; on GPUs only.
        overlap: as in ForwardBackward.
    """

    loading: Task
    model: str
    steps: int
    rounds: int
    precision: "PrecisionName"
    compile: bool
    fused: bool
    cuda_graph: bool
    overlap: bool | None


class BatchSource:
    """A loader, configured for training.

    Attributes:
        resident: a batch of noise with the shapes, dtypes, strides and device of its batches.
        batches: endless pairs of images (N, 3, size, size), channels last, and labels (N,) int64, on the device. The
            loader starts when the first one is requested.
        store: maximum number of batches that it prepares in advance.
    """

    def __init__(self, loading: Task, source: LabeledFiles, precision: "Precision") -> None:
        import torch

        half = loading.gpu and precision.dtype != torch.float32
        # The other loaders deliver normalized floats, which autocast converts.
        formats: dict[str, Pixels] = {"native": "float16" if half else "float32", "torchvision": "float32"}
        pixels = formats.get(loading.loader, "uint8")
        synthetic = our_loader(loading, "synthetic", source, TrainImages(seed=0, image_size=loading.image_size))
        batch = synthetic.resident_batch(loading.batch_size)
        self.resident = batch["images"].to(getattr(torch, pixels)), batch["labels"]
        self.store = 2 * loading.workers if loading.loader == "torchvision" else 2
        if loading.loader == "raydali":
            from raydali.data.loading.dali_loader import PREFETCHED_BATCHES

            self.store = PREFETCHED_BATCHES
        pairs = {"native": _native, "torchvision": _torchvision}.get(loading.loader, _ours)
        self.batches = pairs(LOADERS[loading.loader].batches(replace(loading, pixels=pixels)))


def _ours(batches: Iterable[Any]) -> "Generator[Pair, None, None]":
    for batch in batches:
        yield batch["images"], batch["labels"]


def _native(batches: Iterable[Any]) -> "Generator[Pair, None, None]":
    """Yield batches like DALI's own iterator for PyTorch: the host waits for each batch."""
    from torch.utils.dlpack import from_dlpack

    for images, labels in batches:
        yield from_dlpack(images.as_tensor()).permute(0, 3, 1, 2), from_dlpack(labels.as_tensor()).squeeze(-1).long()


def _torchvision(batches: Iterable[Any]) -> "Generator[Pair, None, None]":
    import torch

    for images, labels in batches:
        yield images.contiguous(memory_format=torch.channels_last), labels


def measure(task: TrainTask, rank: int, port: int) -> dict[str, Any] | None:
    """Measure the segments together with the other ranks; called once in a new process.

    Returns:
        On rank 0 a dict, on the others None:
            "ceiling_before": a measured segment,
            "rounds": a list of dicts of measured segments by name.
        A measured segment is a dict:
            "images_per_second": the sum of all ranks,
            "loader_wait_fraction", "host_wait_fraction": shares of the segment's time, means over ranks.
    """
    import torch

    from raydali.train.step import Precision

    loading = replace(task.loading, rank=rank)
    if loading.gpu and LOADERS[loading.loader].all_queues:
        hardware.set_max_connections()
    worker = _join(loading, port)
    torch.manual_seed(rank)  # so that torchvision's order differs between ranks; DDP broadcasts the weights of rank 0
    torch.backends.cudnn.benchmark = True
    source = LabeledFiles.scan(loading.root)
    precision = Precision(task.precision, worker.device)
    feed = BatchSource(loading, source, precision)
    step = _make_step(task, feed, worker, precision, classes=max(MIN_CLASSES, len(source.classes)))
    segments = Segments(loading, feed, step, worker, steps=task.steps)
    with closing(feed.batches):
        before = segments.before()
        rounds = [segments.round() for _ in range(task.rounds)]
    own = asdict(before), [{name: asdict(segment) for name, segment in each.items()} for each in rounds]
    all_results = worker.gather(own)
    if not all_results:
        return None

    def combine(of_ranks: list[dict[str, float]]) -> dict[str, float]:
        def fraction(name: str) -> float:
            return sum(each[name] / each["seconds"] for each in of_ranks) / len(of_ranks)

        return {
            "images_per_second": sum(task.steps * loading.batch_size / each["seconds"] for each in of_ranks),
            "loader_wait_fraction": fraction("loader_wait_seconds"),
            "host_wait_fraction": fraction("host_wait_seconds"),
        }

    return {
        "ceiling_before": combine([before for before, _ in all_results]),
        "rounds": [
            {name: combine([of_rank[i][name] for _, of_rank in all_results]) for name in rounds[i]}
            for i in range(task.rounds)
        ],
    }


def _join(loading: Task, port: int) -> "Worker":
    import torch

    from raydali.train.worker import Worker

    join_ranks(loading.rank, loading.world_size, port)
    worker = Worker.join(torch.device(loading.device), cpus=loading.threads, node="local")
    if loading.gpu and uses_plain_loop(loading):
        torch.cuda.set_stream(torch.cuda.default_stream(worker.device))
    return worker


def _make_step(task: TrainTask, feed: BatchSource, worker: "Worker", precision: "Precision", *, classes: int) -> "Step":
    import torch

    from raydali.train.models.classification import build_model
    from raydali.train.models.normalized import Normalized

    gpu = worker.device.type == "cuda"
    model = build_model(task.model, classes).to(worker.device).to(memory_format=torch.channels_last)
    images, _ = feed.resident
    return optimizer_step(
        model,
        Normalized(model).to(worker.device) if images.dtype == torch.uint8 else model,
        worker,
        precision,
        compiled=task.compile and gpu,
        fused=task.fused,
        graph=task.cuda_graph and gpu and not uses_plain_loop(task.loading),
        overlap=task.overlap,
    )


def optimizer_step(
    model: "torch.nn.Module",
    wrapped: "torch.nn.Module",
    worker: "Worker",
    precision: "Precision",
    *,
    overlap: bool | None = None,
    **options: bool,
) -> "Step":
    """Return a function that takes an optimizer step on a batch, at learning rate 0: the weights do not change.

    Args:
        model: the model whose parameters are optimized.
        wrapped: the model, or a wrapper of it, that is called with images.
        worker: this rank.
        precision: precision of the forward and the backward pass.
        overlap: an option of ForwardBackward.
        options: its other options.
    """
    import torch

    from raydali.train.optim import parameter_groups
    from raydali.train.step import ForwardBackward

    fused = worker.device.type == "cuda"
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-5), lr=0.0, momentum=0.9, nesterov=True, fused=fused)
    criterion = torch.nn.CrossEntropyLoss()
    forward_backward = ForwardBackward(
        wrapped,
        lambda images, labels: criterion(wrapped(images), labels),
        worker,
        precision,
        micro_batches=worker.world_size,  # one per rank
        overlap=overlap,
        **options,
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward_backward(images, labels)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


@dataclass(frozen=True)
class Segment:
    """Times of a segment on one rank: its length, the device's wait for data, the host's time in `next`."""

    seconds: float
    loader_wait_seconds: float = 0.0
    host_wait_seconds: float = 0.0


def uses_plain_loop(loading: Task) -> bool:
    """Return whether training uses the usual loop: the default stream, kernels launched one by one."""
    return loading.loader == "native"


class Segments:
    """The measurement of segments on one rank. Every rank must call the same methods."""

    def __init__(self, loading: Task, feed: BatchSource, step: Step, worker: "Worker", *, steps: int) -> None:
        self._loading, self._feed, self._step, self._worker, self._steps = loading, feed, step, worker, steps
        self._seconds_per_batch = 0.0

    def before(self) -> Segment:
        """Rehearse, measure the ceiling before a loader exists, then start the loader."""
        from raydali.train.step import WARM_UP_STEPS_OF_DDP

        # A CPU captures nothing, and tunes everything in the first step.
        for _ in range(WARM_UP_STEPS_OF_DDP + 1 if self._worker.device.type == "cuda" else 1):
            self._step(*self._feed.resident)
        ceiling = self._on_resident_batch()
        next(self._feed.batches)
        if not uses_plain_loop(self._loading):  # as raydali's jobs do
            gc.collect()
            gc.freeze()
        return ceiling

    def round(self) -> dict[str, Segment]:
        """Measure each segment once."""
        # Loaders fill their queues, and are idle then.
        time.sleep(max(REST_SECONDS, 2 * self._feed.store * self._seconds_per_batch))
        segments = {"ceiling": self._on_resident_batch(), "real": self._with_loader(lambda batch: self._step(*batch))}
        segments["alone"] = alone = self._with_loader(lambda _: None)
        self._seconds_per_batch = max(self._seconds_per_batch, alone.seconds / self._steps)
        return segments

    def _on_resident_batch(self) -> Segment:
        """Time steps on a batch that is on the device; the first ones after a rest do not count."""
        for _ in range(AWAKE_STEPS[self._worker.device.type]):
            self._step(*self._feed.resident)
        return self._timed(lambda: self._step(*self._feed.resident))

    def _with_loader(self, use: Callable[[Pair], None]) -> Segment:
        """Time taking a batch and using it, once per step of a segment."""
        from raydali.measure.meter import StageClock

        for _ in range(self._feed.store + 1):
            use(next(self._feed.batches))
        clock = StageClock(self._worker.device)
        waited = 0.0

        def body() -> None:
            nonlocal waited
            clock.enter("loader_wait")
            began = time.perf_counter()
            batch = next(self._feed.batches)
            waited += time.perf_counter() - began
            clock.enter("step")
            use(batch)

        segment = self._timed(body)
        return replace(segment, loader_wait_seconds=clock.totals()["loader_wait"], host_wait_seconds=waited)

    def _timed(self, body: Callable[[], None]) -> Segment:
        self._finish()
        self._worker.barrier()
        began = time.perf_counter()
        for _ in range(self._steps):
            body()
        self._finish()
        return Segment(time.perf_counter() - began)

    def _finish(self) -> None:
        if self._worker.device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._worker.device).synchronize()
