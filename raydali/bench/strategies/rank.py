"""A rank of `raydali bench strategies`: the step of each strategy, and what a process measures of it.

    rehearsal       steps on one resident batch, before the loader works: tuned, DDP's buckets in place
    warm-up         steps on the loader's batches that do not count
    rounds          the same, timed; memory is read behind the last
    profiled        few more, by torch.profiler: how long each GPU computed

All strategies are eager, as the scripts are that one finds them in: nothing is compiled, nothing captured.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench.common.processes import meet
from raydali.bench.loader.contenders import endless
from raydali.bench.train.rank import CLASSES
from raydali.data.sources.image_folder import ImageFolder
from raydali.data.tasks.classification import TrainImages
from raydali.host import cuda_queues

if TYPE_CHECKING:
    import torch

    from raydali.data.loading.loader import Batch
    from raydali.train.worker import Worker

AMP: dict[str, Literal["fp16", "bf16"]] = {"cuda": "fp16", "cpu": "bf16"}
"""What mixed precision stands for. On GPUs fp16 with a GradScaler: replicas of DataParallel know no other dtype. CPUs
take many times as long in fp16."""
LEAST_WARM_UP = 5
PROFILED_STEPS = 5

Strategy = Literal["one", "dp", "ddp", "sync-bn"]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class StrategyTask:
    """What the processes of a row measure together.

    Attributes:
        root: a folder of class folders of images.
        gpus: of all processes together; 0 is the CPU.
        processes: 1, or as many as GPUs.
        batch_size: images of a process's batch.
        threads: of a process's loader.
        steps: of a stretch, at least.
        rounds: how many stretches.
    """

    root: str
    strategy: Strategy
    precision: Literal["fp32", "amp"]
    loader: Literal["torch", "dali"]
    model: str
    gpus: int
    processes: int
    batch_size: int
    image_size: int
    threads: int
    steps: int
    rounds: int

    @property
    def ahead(self) -> int:
        """Batches that the loader of a process may hold when training takes the first, in one burst."""
        if self.loader == "torch":
            return self.threads
        from raydali.data.loading.dali_loader import PREFETCHED_BATCHES

        return PREFETCHED_BATCHES

    @property
    def stretch(self) -> int:
        """Steps of a stretch: with the torch loader whole turns of its workers, whose batches come in bursts."""
        return -(-self.steps // self.threads) * self.threads if self.loader == "torch" else self.steps

    def gpus_of(self, rank: int) -> range:
        """The GPUs that a process works on."""
        each = self.gpus // self.processes
        return range(rank * each, (rank + 1) * each)


def measure(task: StrategyTask, rank: int, port: int) -> dict[str, Any] | None:
    """Measure, with all the others; to be called once in a fresh process.

    Returns:
        On rank 0 {"rounds": [{"images_per_second" over all GPUs, "loader_wait_fraction", mean over ranks}, ...],
        "memory": [of each GPU {"allocated_bytes", "reserved_bytes", "used_bytes"}, ...], "busy_seconds": [of each GPU
        and step, ...]}; the last two are null on the CPU, and the last where the profiler saw no kernels. On others
        None.
    """
    import torch

    from raydali.data.loading.make import make_loader
    from raydali.train.step import WARM_UP_STEPS
    from raydali.train.worker import Worker

    if task.gpus and task.loader == "dali":
        cuda_queues.set_max_connections()
    meet(rank, task.processes, port)
    device = torch.device("cuda", rank) if task.gpus else torch.device("cpu")
    worker = Worker.join(device, cpus=task.threads, node="local")
    torch.manual_seed(rank)
    # DataParallel computes in new threads at each step, and what cuDNN has tried out is known to one thread only.
    torch.backends.cudnn.benchmark = task.strategy != "dp"
    source = ImageFolder.scan(task.root)
    step = _make_step(task, worker, classes=max(CLASSES, len(source.classes)))
    order = endless(len(source), task.batch_size, task.processes)
    pipeline = TrainImages(seed=0, image_size=task.image_size)
    with make_loader(
        task.loader,
        source,
        pipeline,
        order,
        rank=rank,
        world_size=worker.world_size,
        device=device,
        threads=task.threads,
    ) as loader:
        resident = loader.resident_batch(task.batch_size)
        for _ in range(WARM_UP_STEPS if task.gpus else 1):
            step(resident["images"], resident["labels"])
        del resident
        batches = iter(loader)
        for _ in range(max(LEAST_WARM_UP if task.gpus else 1, task.ahead)):
            _take(batches, step)
        _forget_memory(task.gpus_of(rank))
        rounds = [_stretch(task, worker, batches, step) for _ in range(task.rounds)]
        memory = [_memory(gpu) for gpu in task.gpus_of(rank)]
        busy = _busy_seconds(batches, step, task.gpus_of(rank))
    everyone = worker.gather((rounds, memory, busy))
    if not everyone:
        return None
    return {
        "rounds": [
            {
                "images_per_second": sum(theirs[i]["images_per_second"] for theirs, _, _ in everyone),
                "loader_wait_fraction": sum(theirs[i]["loader_wait_fraction"] for theirs, _, _ in everyone)
                / len(everyone),
            }
            for i in range(task.rounds)
        ],
        "memory": [each for _, theirs, _ in everyone for each in theirs] or None,
        "busy_seconds": [each for _, _, theirs in everyone for each in theirs]
        if task.gpus and all(theirs for _, _, theirs in everyone)
        else None,
    }


def _make_step(task: StrategyTask, worker: "Worker", *, classes: int) -> "Callable[[torch.Tensor, torch.Tensor], None]":
    """One step of the optimiser on a batch; at learning rate 0, so that no weight ever leaves its range."""
    import torch

    from raydali.train.models.classification import build_model
    from raydali.train.models.normalized import Normalized
    from raydali.train.optim import parameter_groups
    from raydali.train.precision import Precision
    from raydali.train.step import ForwardBackward

    precision = Precision("fp32" if task.precision == "fp32" else AMP[worker.device.type], worker.device)
    model = build_model(task.model, classes).to(worker.device)
    # DataParallel's replicas get their weights as pieces of one buffer, at addresses that cuDNN's kernels for
    # channels-last images cannot read from (misaligned address).
    layout = torch.contiguous_format if task.strategy == "dp" else torch.channels_last
    model = model.to(memory_format=layout)
    if task.strategy == "sync-bn":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, worker.gradients)
    optimizer = torch.optim.SGD(parameter_groups(model, 5e-5), lr=0.0, momentum=0.9, nesterov=True, fused=task.gpus > 0)
    model = Normalized(model).to(worker.device)
    if task.strategy == "dp":
        model = torch.nn.DataParallel(model, device_ids=list(task.gpus_of(worker.rank)))
    criterion = torch.nn.CrossEntropyLoss()
    forward_backward = ForwardBackward(
        model,
        lambda images, labels: criterion(model(images), labels),
        worker,
        precision,
        micro_batches=worker.world_size,
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        forward_backward(images.contiguous(memory_format=layout), labels)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return step


def _take(batches: "Iterator[Batch]", step: "Callable[[torch.Tensor, torch.Tensor], None]") -> None:
    batch = next(batches)
    step(batch["images"], batch["labels"])


def _stretch(
    task: StrategyTask,
    worker: "Worker",
    batches: "Iterator[Batch]",
    step: "Callable[[torch.Tensor, torch.Tensor], None]",
) -> dict[str, float]:
    """This process's rate, and the share of the time in which its (first) GPU had no data."""
    import time

    from raydali.measure.clock import StageClock

    worker.barrier()
    clock = StageClock(worker.device)
    began = time.perf_counter()
    for _ in range(task.stretch):
        clock.enter("loader_wait")
        batch = next(batches)
        clock.enter("step")
        step(batch["images"], batch["labels"])
    waited = clock.totals()["loader_wait"]  # waits for the device
    seconds = time.perf_counter() - began
    return {
        "images_per_second": task.stretch * task.batch_size / seconds,
        "loader_wait_fraction": waited / seconds,
    }


def _forget_memory(gpus: Iterable[int]) -> None:
    """So that what cuDNN tried out does not count."""
    import torch

    torch.cuda.empty_cache()  # does nothing where there is no GPU
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)


def _memory(gpu: int) -> dict[str, int]:
    import torch

    free, total = torch.cuda.mem_get_info(gpu)
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(gpu),
        "reserved_bytes": torch.cuda.max_memory_reserved(gpu),
        "used_bytes": total - free,
    }


def _busy_seconds(
    batches: "Iterator[Batch]", step: "Callable[[torch.Tensor, torch.Tensor], None]", gpus: range
) -> list[float]:
    """How long each GPU computes for a step; empty where there is none, or the profiler may not look.

    NCCL's kernels are left out: most of their time they wait for the other GPUs. So are copies.
    """
    if not gpus:
        return []
    import torch
    from torch.profiler import ProfilerActivity, profile

    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            _take(batches, step)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)
    kernels: dict[int, list[Interval]] = {gpu: [] for gpu in gpus}
    for event in profiler.events() or []:
        if event.device_index in kernels and is_computing(event):
            kernels[event.device_index].append((event.time_range.start, event.time_range.end))
    microseconds = [covered(intervals) for intervals in kernels.values()]
    return [each / 1e6 / PROFILED_STEPS for each in microseconds] if any(microseconds) else []


def is_computing(event: Any) -> bool:
    """Whether an event of torch's profiler is a kernel that computes, and not one that communicates or a copy."""
    if event.device_type.name != "CUDA" or event.is_user_annotation:
        return False
    return not event.name.startswith(("Memcpy", "Memset")) and "nccl" not in event.name.lower()


def covered(intervals: Iterable[Interval]) -> float:
    """The length of what intervals cover together; where they overlap it counts once."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length
