"""A rank of `raydali bench train`: joins the others, builds the step and measures the segments of segments.py."""

from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raydali.bench.common.processes import join_ranks
from raydali.bench.loader.contenders import LOADERS, Task
from raydali.bench.train.feed import BatchSource
from raydali.bench.train.segments import Segments, Step, is_plain
from raydali.data.sources.image_folder import ImageFolder
from raydali.host import cuda_queues

if TYPE_CHECKING:
    import torch

    from raydali.train.precision import Precision, PrecisionName
    from raydali.train.worker import Worker

CLASSES = 1000
"""Minimum number of classes of the model."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """The measurement of a combination by all ranks.

    Attributes:
        delivery: the loader, its settings and the number of ranks; each rank sets its own rank.
        model: a name that `build_model` accepts.
        steps: steps per segment.
        rounds: how often each segment is measured.
        compile, cuda_graph: as in ForwardBackward; on GPUs only.
        split: whether replay and both contentions are also measured.
    """

    delivery: Task
    model: str
    steps: int
    rounds: int
    precision: "PrecisionName"
    compile: bool
    cuda_graph: bool
    split: bool


def measure(task: TrainTask, rank: int, port: int) -> dict[str, Any] | None:
    """Measure the segments together with the other ranks; called once in a new process.

    Returns:
        On rank 0 {"ceiling_before", "rounds": [{"ceiling", "real", "alone", with `split` "replay", "contention" and
        perhaps "host_contention"}, ...]}, each segment {"images_per_second" over all ranks, "loader_wait_fraction"
        and "host_wait_fraction" of its time, means over ranks}. On the others None.
    """
    import torch

    from raydali.train.precision import Precision

    delivery = replace(task.delivery, rank=rank)
    if delivery.gpu and LOADERS[delivery.loader].all_queues:
        cuda_queues.set_max_connections()
    worker = _join(delivery, port)
    torch.manual_seed(rank)  # DDP broadcasts rank 0's weights; torchvision's order must differ between ranks
    torch.backends.cudnn.benchmark = True
    source = ImageFolder.scan(delivery.root)
    precision = Precision(task.precision, worker.device)
    feed = BatchSource(delivery, source, precision)
    step = _make_step(task, feed, worker, precision, classes=max(CLASSES, len(source.classes)))
    segments = Segments(delivery, feed, step, worker, steps=task.steps, split=task.split)
    with closing(feed.batches), closing(segments):
        before = segments.before()
        rounds = [segments.round() for _ in range(task.rounds)]
    own = asdict(before), [{name: asdict(segment) for name, segment in each.items()} for each in rounds]
    everyone = worker.gather(own)
    if not everyone:
        return None

    def together(of_ranks: list[dict[str, float]]) -> dict[str, float]:
        def waiting(name: str) -> float:
            return sum(each[name] / each["seconds"] for each in of_ranks) / len(of_ranks)

        return {
            "images_per_second": sum(task.steps * delivery.batch_size / each["seconds"] for each in of_ranks),
            "loader_wait_fraction": waiting("loader_wait_seconds"),
            "host_wait_fraction": waiting("host_wait_seconds"),
        }

    return {
        "ceiling_before": together([before for before, _ in everyone]),
        "rounds": [
            {name: together([theirs[i][name] for _, theirs in everyone]) for name in rounds[i]}
            for i in range(task.rounds)
        ],
    }


def _join(delivery: Task, port: int) -> "Worker":
    import torch

    from raydali.train.worker import Worker

    join_ranks(delivery.rank, delivery.world_size, port)
    worker = Worker.join(torch.device(delivery.device), cpus=delivery.threads, node="local")
    if delivery.gpu and is_plain(delivery):
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
        graph=task.cuda_graph and gpu and not is_plain(task.delivery),
    )


def optimizer_step(
    model: "torch.nn.Module", trained: "torch.nn.Module", worker: "Worker", precision: "Precision", **options: bool
) -> "Step":
    """Return a function that takes one optimizer step on a batch, at learning rate 0 so that weights keep their range.

    Args:
        model: the model whose parameters are optimized.
        trained: the model, or a wrapper of it, that is called with images.
        worker: this rank.
        precision: precision of the forward and the backward pass.
        options: options of ForwardBackward.
    """
    import torch

    from raydali.train.optim import parameter_groups
    from raydali.train.step import ForwardBackward

    fused = worker.device.type == "cuda"
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-5), lr=0.0, momentum=0.9, nesterov=True, fused=fused)
    criterion = torch.nn.CrossEntropyLoss()
    forward_backward = ForwardBackward(
        trained,
        lambda images, labels: criterion(trained(images), labels),
        worker,
        precision,
        micro_batches=worker.world_size,
        **options,
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward_backward(images, labels)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step
