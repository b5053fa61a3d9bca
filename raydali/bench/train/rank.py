"""A rank of `raydali bench train`: it joins the others, builds the step and measures it, as segments.py says."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raydali.bench.common.processes import meet
from raydali.bench.loader.contenders import LOADERS, Task
from raydali.bench.train.feed import BatchSource
from raydali.bench.train.segments import Segment, Segments, is_plain
from raydali.data.sources.image_folder import ImageFolder
from raydali.host import cuda_queues

if TYPE_CHECKING:
    import torch

    from raydali.train.precision import Precision, PrecisionName
    from raydali.train.worker import Worker

CLASSES = 1000
"""Of the model, where the data has no more."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What the ranks measure together.

    Attributes:
        delivery: the loader, its settings and the number of ranks; each puts its own rank in.
        model: as `build_model` knows it.
        steps: of a stretch.
        rounds: how often each stretch is measured.
        compile, cuda_graph: as in ForwardBackward; both on GPUs only.
        split: whether replay and both contentions are measured too.
        timeout: for all of it, seconds.
    """

    delivery: Task
    model: str
    steps: int
    rounds: int
    precision: "PrecisionName"
    compile: bool
    cuda_graph: bool
    split: bool
    timeout: float


def measure(task: TrainTask, rank: int, port: int) -> dict[str, Any] | None:
    """Measure, with all the others; to be called once in a fresh process.

    Returns:
        On rank 0 {"ceiling_before", "rounds": [{"ceiling", "real", "alone", with `split` "replay", "contention" and
        perhaps "host_contention"}, ...]}, each stretch {"images_per_second" over all ranks, "loader_wait_fraction"
        and "host_wait_fraction" of its time, means over ranks}. On others None.
    """
    import torch

    from raydali.train.precision import Precision

    delivery = replace(task.delivery, rank=rank)
    if delivery.gpu and LOADERS[delivery.loader].all_queues:
        cuda_queues.set_max_connections()
    worker = _join(delivery, port)
    torch.manual_seed(rank)  # DDP hands out rank 0's weights; torchvision's order is to be each rank's own
    torch.backends.cudnn.benchmark = True
    source = ImageFolder.scan(delivery.root)
    precision = Precision(task.precision, worker.device)
    feed = BatchSource(delivery, source, precision, worker)
    step = _make_step(task, feed, worker, precision, classes=max(CLASSES, len(source.classes)))
    stretches = Segments(delivery, feed, step, worker, steps=task.steps, split=task.split)
    with closing(feed.batches), closing(stretches):
        before = stretches.before()
        rounds = [stretches.round() for _ in range(task.rounds)]
    own = asdict(before), [{name: asdict(stretch) for name, stretch in each.items()} for each in rounds]
    everyone = worker.gather(own)
    if not everyone:
        return None

    def together(of_ranks: list[dict[str, float]]) -> dict[str, float]:
        own = [Segment(**each) for each in of_ranks]
        return {
            "images_per_second": sum(task.steps * delivery.batch_size / stretch.seconds for stretch in own),
            "loader_wait_fraction": sum(stretch.loader_wait_seconds / stretch.seconds for stretch in own) / len(own),
            "host_wait_fraction": sum(stretch.host_wait_seconds / stretch.seconds for stretch in own) / len(own),
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

    meet(delivery.rank, delivery.world_size, port)
    worker = Worker.join(torch.device(delivery.device), cpus=delivery.threads, node="local")
    if delivery.gpu and is_plain(delivery):
        torch.cuda.set_stream(torch.cuda.default_stream(worker.device))
    return worker


def _make_step(
    task: TrainTask, feed: BatchSource, worker: "Worker", precision: "Precision", *, classes: int
) -> "Callable[[torch.Tensor, torch.Tensor], None]":
    """One step of the optimiser on a batch; at learning rate 0, so that no weight ever leaves its range."""
    import torch

    from raydali.train.models.classification import build_model
    from raydali.train.models.normalized import Normalized
    from raydali.train.optim import parameter_groups
    from raydali.train.step import ForwardBackward

    gpu = worker.device.type == "cuda"
    model = build_model(task.model, classes).to(worker.device)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-5), lr=0.0, momentum=0.9, nesterov=True, fused=gpu)
    images, _ = feed.resident
    network = Normalized(model).to(worker.device) if images.dtype == torch.uint8 else model
    criterion = torch.nn.CrossEntropyLoss()
    forward_backward = ForwardBackward(
        model,
        lambda images, labels: criterion(network(images), labels),
        worker,
        precision,
        micro_batches=worker.world_size,
        compiled=task.compile and gpu,
        graph=task.cuda_graph and gpu and not is_plain(task.delivery),
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward_backward(images, labels)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step
