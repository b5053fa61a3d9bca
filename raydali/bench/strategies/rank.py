"""A rank of `raydali bench strategies`: the step of each strategy, and its measurement.

    rehearsal       steps on one resident batch, before the loader starts: tuning, DDP's buckets
    warm-up         steps on the loader's batches that do not count
    rounds          the same, timed; memory is read after the last
    profiled        a few more, with torch.profiler: the computing time of each GPU

All strategies are eager, as in the scripts that use them: nothing is compiled or captured.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench.common.processes import join_ranks
from raydali.bench.loader.contenders import Task, our_loader
from raydali.bench.train.rank import MIN_CLASSES, Step, optimizer_step
from raydali.data.sources.image_folder import ImageFolder
from raydali.data.tasks.classification import TrainImages
from raydali.host import cuda_queues

if TYPE_CHECKING:
    from raydali.data.loading.loader import Batch
    from raydali.train.worker import Worker

AMP: dict[str, Literal["fp16", "bf16"]] = {"cuda": "fp16", "cpu": "bf16"}
"""The dtype of mixed precision. On GPUs fp16 with a GradScaler, the only one that DataParallel's replicas support. CPUs
take many times as long in fp16."""
MIN_WARM_UP = 5
PROFILED_STEPS = 5

Strategy = Literal["one", "dp", "ddp", "sync-bn"]
Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class StrategyTask(Task):
    """The measurement of a row by all its processes; `loader` is torch or dali, `world_size` the number of processes.

    Attributes:
        gpus: number of GPUs of all processes together; 0 means the CPU.
        steps: minimum steps per segment.
        rounds: number of segments.
    """

    strategy: Strategy
    precision: Literal["fp32", "amp"]
    model: str
    gpus: int
    steps: int
    rounds: int

    @property
    def ahead(self) -> int:
        """Maximum number of batches that the loader of a process has prepared when training takes the first."""
        if self.loader == "torch":
            return self.threads
        from raydali.data.loading.dali_loader import PREFETCHED_BATCHES

        return PREFETCHED_BATCHES

    @property
    def segment_steps(self) -> int:
        """Steps per segment: with the torch loader whole turns of its workers, whose batches come in bursts."""
        return -(-self.steps // self.threads) * self.threads if self.loader == "torch" else self.steps

    @property
    def own_gpus(self) -> range:
        """The GPUs of this process."""
        each = self.gpus // self.world_size
        return range(self.rank * each, (self.rank + 1) * each)


def measure_strategy(task: StrategyTask, rank: int, port: int) -> dict[str, Any] | None:
    """Measure a strategy together with the other ranks; called once in a new process.

    Returns:
        On rank 0 {"rounds": [{"images_per_second" over all GPUs, "loader_wait_fraction", mean over ranks}, ...],
        "memory": [of each GPU {"allocated_bytes", "reserved_bytes", "used_bytes"}, ...], "busy_seconds": [of each GPU
        and step, ...]}; the last two are null on the CPU, and the last if the profiler recorded no kernels. On the
        others None.
    """
    import torch

    from raydali.train.step import WARM_UP_STEPS_OF_DDP
    from raydali.train.worker import Worker

    task = replace(task, rank=rank)
    if task.gpus and task.loader == "dali":
        cuda_queues.set_max_connections()
    join_ranks(rank, task.world_size, port)
    worker = Worker.join(torch.device(task.device), cpus=task.threads, node="local")
    torch.manual_seed(rank)
    # DataParallel computes in new threads at each step, and cuDNN's tuning results belong to a thread.
    torch.backends.cudnn.benchmark = task.strategy != "dp"
    source = ImageFolder.scan(task.root)
    step = _make_step(task, worker, classes=max(MIN_CLASSES, len(source.classes)))
    name: Any = task.loader
    with our_loader(task, name, source, TrainImages(seed=0, image_size=task.image_size)) as loader:
        resident = loader.resident_batch(task.batch_size)
        for _ in range(WARM_UP_STEPS_OF_DDP if task.gpus else 1):
            step(resident["images"], resident["labels"])
        del resident
        batches = iter(loader)
        for _ in range(max(MIN_WARM_UP if task.gpus else 1, task.ahead)):
            _take(batches, step)
        _reset_memory_peaks(task.own_gpus)
        rounds = [_segment(task, worker, batches, step) for _ in range(task.rounds)]
        memory = [_memory(gpu) for gpu in task.own_gpus]
        busy = _busy_seconds(batches, step, task.own_gpus)
    everyone = worker.gather((rounds, memory, busy))
    if not everyone:
        return None
    rounds_of, memory_of, busy_of = zip(*everyone, strict=True)
    return {
        "rounds": [
            {
                "images_per_second": sum(each["images_per_second"] for each in ranks),
                "loader_wait_fraction": sum(each["loader_wait_fraction"] for each in ranks) / len(ranks),
            }
            for ranks in zip(*rounds_of, strict=True)
        ],
        "memory": [each for own in memory_of for each in own] or None,
        "busy_seconds": [each for own in busy_of for each in own] if task.gpus and all(busy_of) else None,
    }


def _make_step(task: StrategyTask, worker: "Worker", *, classes: int) -> Step:
    import torch

    from raydali.train.models.classification import build_model
    from raydali.train.models.normalized import Normalized
    from raydali.train.precision import Precision

    precision = Precision("fp32" if task.precision == "fp32" else AMP[worker.device.type], worker.device)
    # DataParallel's replicas get their weights as pieces of one buffer, at addresses that cuDNN's kernels for
    # channels-last images cannot read from (misaligned address).
    layout = torch.contiguous_format if task.strategy == "dp" else torch.channels_last
    model = build_model(task.model, classes).to(worker.device).to(memory_format=layout)
    if task.strategy == "sync-bn":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, worker.gradients)
    trained: torch.nn.Module = Normalized(model).to(worker.device)
    if task.strategy == "dp":
        trained = torch.nn.DataParallel(trained, device_ids=list(task.own_gpus))
    step = optimizer_step(model, trained, worker, precision)
    return lambda images, labels: step(images.contiguous(memory_format=layout), labels)


def _take(batches: "Iterator[Batch]", step: Step) -> None:
    batch = next(batches)
    step(batch["images"], batch["labels"])


def _segment(task: StrategyTask, worker: "Worker", batches: "Iterator[Batch]", step: Step) -> dict[str, float]:
    """Measure this process's rate, and the share of the time in which its (first) GPU had no data."""
    from raydali.measure.clock import StageClock

    worker.barrier()
    clock = StageClock(worker.device)
    began = time.perf_counter()
    for _ in range(task.segment_steps):
        clock.enter("loader_wait")
        batch = next(batches)
        clock.enter("step")
        step(batch["images"], batch["labels"])
    waited = clock.totals()["loader_wait"]  # waits for the device
    seconds = time.perf_counter() - began
    return {
        "images_per_second": task.segment_steps * task.batch_size / seconds,
        "loader_wait_fraction": waited / seconds,
    }


def _reset_memory_peaks(gpus: Iterable[int]) -> None:
    """Reset torch's peaks, so that cuDNN's tuning does not count."""
    import torch

    torch.cuda.empty_cache()  # does nothing without a GPU
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


def _busy_seconds(batches: "Iterator[Batch]", step: Step, gpus: range) -> list[float]:
    """Profile the computing time of each GPU per step; empty without GPUs, or without permission to profile.

    NCCL's kernels are left out, since they mostly wait for the other GPUs, and so are copies.
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
    """Return whether an event of torch's profiler is a kernel that computes: no communication and no copy."""
    if event.device_type.name != "CUDA" or event.is_user_annotation:
        return False
    return not event.name.startswith(("Memcpy", "Memset")) and "nccl" not in event.name.lower()


def covered(intervals: Iterable[Interval]) -> float:
    """Return the total length that intervals cover; overlaps count once."""
    length, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length
