"""A rank of `raydali bench train`: joins the others, builds the step and measures the segments of segments.py."""

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raydali.bench.common.processes import join_ranks
from raydali.bench.loader.contenders import LOADERS, Task
from raydali.bench.train.feed import BatchSource
from raydali.bench.train.segments import Segments, Step, uses_plain_loop
from raydali.data.sources.image_folder import ImageFolder
from raydali.host import cuda_queues

if TYPE_CHECKING:
    import torch

    from raydali.train.precision import Precision, PrecisionName
    from raydali.train.worker import Worker

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
        split: whether to also measure the segments replay, contention and host_contention of segments.py.
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
    split: bool


def measure(task: TrainTask, rank: int, port: int) -> dict[str, Any] | None:
    """Measure the segments together with the other ranks; called once in a new process.

    Returns:
        On rank 0 a dict, on the others None:
            "ceiling_before": a measured segment,
            "rounds": a list of dicts of measured segments by their name in segments.py.
        A measured segment is a dict:
            "images_per_second": the sum of all ranks,
            "loader_wait_fraction", "host_wait_fraction": shares of the segment's time, means over ranks.
    """
    import torch

    from raydali.train.precision import Precision

    loading = replace(task.loading, rank=rank)
    if loading.gpu and LOADERS[loading.loader].all_queues:
        cuda_queues.set_max_connections()
    worker = _join(loading, port)
    torch.manual_seed(rank)  # so that torchvision's order differs between ranks; DDP broadcasts the weights of rank 0
    torch.backends.cudnn.benchmark = True
    source = ImageFolder.scan(loading.root)
    precision = Precision(task.precision, worker.device)
    feed = BatchSource(loading, source, precision)
    step = _make_step(task, feed, worker, precision, classes=max(MIN_CLASSES, len(source.classes)))
    segments = Segments(loading, feed, step, worker, steps=task.steps, split=task.split)
    with closing(feed.batches), closing(segments):
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
