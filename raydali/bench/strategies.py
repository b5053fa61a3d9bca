"""`raydali bench strategies`: the separate effects of several GPUs, mixed precision and DALI on training.

    raydali bench strategies --data ~/imagenet/train --gpus 4 --json s.json
    raydali bench strategies --strategies one,ddp --precisions amp --loaders dali

    one       one GPU
    dp        torch.nn.DataParallel: one process and one loader for all GPUs; batches are split, losses gathered
    ddp       DistributedDataParallel: a process per GPU, each with its own loader
    sync-bn   ddp with SyncBatchNorm

Each runs in fp32 (convolutions in TF32, torch's default) and amp (fp16 with a GradScaler), with Pillow in torch's
DataLoader and with DALI. All are eager, as usual scripts are, so these rates are not those of raydali's jobs: see
`raydali bench train`. No job of raydali uses DataParallel. Without a GPU one process and DDP with two are measured.

Each process takes steps on one resident batch before the loader starts, for tuning and DDP's buckets, then steps on
the loader's batches that do not count, and then the timed segments. Memory is read after the last one.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench import common
from raydali.bench.common import (
    TrainingOptions,
    cell,
    collect,
    measured_row,
    ratio,
    result_of,
    show_rows,
    spread,
    task_of,
)
from raydali.bench.image_loaders import Task, our_loader
from raydali.bench.processes import join_ranks
from raydali.bench.train_rank import MIN_CLASSES, Step, optimizer_step
from raydali.data.sources.labeled import LabeledFiles
from raydali.data.tasks.classification import TrainImages
from raydali.errors import UsageError
from raydali.host import hardware
from raydali.output import devices, gpu_names
from raydali.text import number

if TYPE_CHECKING:
    from raydali.data.loading.loader import Batch
    from raydali.train.worker import Worker

STRATEGIES = {"one": "one GPU", "dp": "DataParallel", "ddp": "DDP", "sync-bn": "DDP + SyncBatchNorm"}
"""The names that --strategies accepts, and what each is called in tables."""
ON_CPU = ("one", "ddp")
CPU_PROCESSES = 2
"""Processes of DDP without a GPU."""
PRECISIONS = ("fp32", "amp")
LOADERS = ("torch", "dali")
AMP: dict[str, Literal["fp16", "bf16"]] = {"cuda": "fp16", "cpu": "bf16"}
"""The dtype of mixed precision. On GPUs fp16 with a GradScaler, the only one that DataParallel's replicas support. CPUs
take many times as long in fp16."""
MIN_WARM_UP = 5
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StrategiesBench(TrainingOptions):
    """Measure one GPU, DataParallel, DDP and SyncBatchNorm, in fp32 and AMP, with torch's loader and DALI."""

    gpus: int | None = None  # type: ignore[assignment]
    """Number of GPUs for all strategies except `one`. Default: all GPUs of the machine; 0 means the CPU."""
    model: str = "resnet50"
    """A torchvision classification model by name, or digits, a small network."""
    batch_size: int = 128
    """Images per batch and GPU. DataParallel has one loader with batches for all GPUs."""
    threads: int = 8
    """DALI threads per GPU. DataParallel has one loader with the threads of all GPUs."""
    workers: int = 8
    """Worker processes of torch's DataLoader per GPU. DataParallel has one loader with those of all GPUs."""
    steps: int = 40
    """Steps of each measured segment; with torch's DataLoader rounded up to whole turns of its workers."""
    strategies: str = ",".join(STRATEGIES)
    """Strategies to measure. Those that need several GPUs are left out on a machine with one."""
    precisions: str = ",".join(PRECISIONS)
    """Precisions to measure: fp32, amp (fp16 with a GradScaler; bf16 without a GPU)."""
    loaders: str = ",".join(LOADERS)
    """Loaders to measure: torch (Pillow in torch's DataLoader), dali."""


def main(options: StrategiesBench) -> dict[str, Any]:
    """Measure each combination, show the table and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"strategy", "precision", "loader",
        "gpus" (0: the CPU), "processes", "error", METRICS, "to_one" (the ratio of its rate to the rate of strategy one
        with the same precision and loader)}. Null: not measured.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a row could not be measured; after the other results were shown and written.
    """
    wanted = _rows(options)
    gpus = max(row["gpus"] for row in wanted)
    settings = common.training_settings(options, gpus, max(row["processes"] for row in wanted))
    result = result_of("bench strategies", settings | {"gpus": gpus}, [])
    rows = _measured(options, settings["make"] or 0, wanted)
    return collect(result, rows, options, name=_name, line=_line, show_table=_show_table)


def _measured(options: StrategiesBench, make: int, wanted: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    from raydali.bench.processes import run_ranks
    from raydali.bench.synthetic_images import synthetic_images

    def measured() -> Any:
        per_process = max(1, row["gpus"] // row["processes"])
        task = task_of(
            StrategyTask,
            options,
            **{name: row[name] for name in ("strategy", "precision", "loader", "gpus")},
            root=root,
            batch_size=options.batch_size * per_process,
            threads=per_process * (options.workers if row["loader"] == "torch" else options.threads),
            rounds=options.repeats,
            seconds=0.0,
            gpu=row["gpus"] > 0,
            world_size=row["processes"],
        )
        return run_ranks(measure_strategy, task, task.world_size, timeout=options.timeout)[0]

    done: list[dict[str, Any]] = []
    with synthetic_images(options.data, make) as root:
        for row in wanted:
            done.append(measured_row(row, _name(row), measured, METRICS))
            yield done[-1] | {"to_one": to_one(done[-1], done)}


def _rows(options: StrategiesBench) -> list[dict[str, Any]]:
    """List the rows to measure, without metrics; a message names the strategies that need more GPUs."""
    common.check(options, loaders=LOADERS, strategies=STRATEGIES, precisions=PRECISIONS)
    strategies, precisions = common.names(options.strategies), common.names(options.precisions)
    if options.model != "digits":
        from raydali.train.models.classification import check_model  # imports torchvision: seconds

        check_model(options.model)
    gpus = len(gpu_names()) if options.gpus is None else common.gpu_counts(str(options.gpus))[0]
    possible = STRATEGIES if gpus > 1 else ON_CPU if not gpus else ("one",)
    left_out = [STRATEGIES[each] for each in strategies if each not in possible]
    if left_out:
        needs = f"need at least 2 GPUs, and this is on {devices(gpus) if gpus else 'the CPU'}"
        if len(left_out) == len(strategies):
            raise UsageError(f"--strategies {options.strategies} {needs}: add one, or raise --gpus")
        print(f"left out: {', '.join(left_out)}: they {needs}", file=sys.stderr)
    return [
        {
            "strategy": strategy,
            "precision": precision,
            "loader": loader,
            "gpus": min(1, gpus) if strategy == "one" else gpus,
            "processes": 1 if strategy in ("one", "dp") else gpus or CPU_PROCESSES,
        }
        for strategy in strategies
        if strategy in possible
        for precision in precisions
        for loader in common.names(options.loaders)
    ]


def strategy_name(row: dict[str, Any]) -> str:
    """Describe a row's strategy and the devices that it runs on."""
    if not row["gpus"]:
        return "one process" if row["strategy"] == "one" else f"DDP, {row['processes']} processes"
    return STRATEGIES[row["strategy"]] + (f", {devices(row['gpus'])}" if row["gpus"] > 1 else "")


def to_one(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> float | None:
    """Return the ratio of a row's rate to strategy one's with the same precision and loader; None if not measured."""
    same = ("one", row["precision"], row["loader"])
    ones = (each for each in rows if (each["strategy"], each["precision"], each["loader"]) == same)
    one = next(ones, {"images_per_second": None})
    return ratio(row["images_per_second"], one["images_per_second"])


def _name(row: dict[str, Any]) -> str:
    return f"{strategy_name(row)}, {row['precision']}, {row['loader']}"


def _line(row: dict[str, Any]) -> str:
    return f"{_name(row)}: {number(row['images_per_second'])} images/s"


def _show_table(result: dict[str, Any]) -> None:
    settings, rows = result["settings"], result["rows"]

    def memory(figure: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: " ".join(f"{each[figure] / GIB:.1f}" for each in row["memory"] or []) or "-"

    show_rows(
        f"{settings['model']}, {settings['images']:,} images to {settings['image_size']} x {settings['image_size']} "
        f"pixels, batches of {settings['batch_size']} per GPU, {settings['threads']} threads or {settings['workers']} "
        "workers per GPU\n"
        "GiB of each GPU: the peak of torch's tensors, and all memory in use at the end (with DALI, CUDA, NCCL, other "
        "programs)",
        {
            "strategy, precision, loader": _name,
            "images/s": cell("images_per_second"),
            "lowest .. highest": spread,
            "/ one": cell("to_one", ".2f"),
            "no data": cell("loader_wait_fraction", ".0%"),
            "GiB: torch": memory("allocated_bytes"),
            "GiB: all": memory("used_bytes"),
        },
        rows,
    )


def _rates(measured: dict[str, Any]) -> list[float]:
    return [each["images_per_second"] for each in measured["rounds"]]


METRICS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "images_per_second": lambda measured: statistics.median(_rates(measured)),
    "low": lambda measured: min(_rates(measured)),
    "high": lambda measured: max(_rates(measured)),
    "repeats": _rates,
    "loader_wait_fraction": lambda measured: statistics.median(
        each["loader_wait_fraction"] for each in measured["rounds"]
    ),
    "memory": lambda measured: measured["memory"],
}
"""Metrics of a row, computed from what rank 0 returns. Rates are of all GPUs; loader_wait_fraction is the share of the
time in which GPUs had no data. memory has of each GPU, in bytes, torch's peaks after the warm-up ("allocated_bytes",
"reserved_bytes"), and what the driver reports at the end ("used_bytes", with DALI, CUDA, NCCL and other programs)."""


# Code of the processes that measure.


@dataclass(frozen=True, kw_only=True)
class StrategyTask(Task):
    """The measurement of a row by all its processes; `loader` is torch or dali, `world_size` the number of processes.

    Attributes:
        gpus: number of GPUs of all processes together; 0 means the CPU.
        steps: minimum steps per segment.
        rounds: number of segments.
    """

    strategy: Literal["one", "dp", "ddp", "sync-bn"]
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
        "memory": [of each GPU {"allocated_bytes", "reserved_bytes", "used_bytes"}, ...] or null on the CPU}. On the
        others None.
    """
    import torch

    from raydali.train.step import WARM_UP_STEPS_OF_DDP
    from raydali.train.worker import Worker

    task = replace(task, rank=rank)
    if task.gpus and task.loader == "dali":
        hardware.set_max_connections()
    join_ranks(rank, task.world_size, port)
    worker = Worker.join(torch.device(task.device), cpus=task.threads, node="local")
    torch.manual_seed(rank)
    # DataParallel computes in new threads at each step, and cuDNN's tuning results belong to a thread.
    torch.backends.cudnn.benchmark = task.strategy != "dp"
    source = LabeledFiles.scan(task.root)
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
    everyone = worker.gather((rounds, memory))
    if not everyone:
        return None
    rounds_of, memory_of = zip(*everyone, strict=True)
    return {
        "rounds": [
            {
                "images_per_second": sum(each["images_per_second"] for each in ranks),
                "loader_wait_fraction": sum(each["loader_wait_fraction"] for each in ranks) / len(ranks),
            }
            for ranks in zip(*rounds_of, strict=True)
        ],
        "memory": [each for own in memory_of for each in own] or None,
    }


def _make_step(task: StrategyTask, worker: "Worker", *, classes: int) -> Step:
    import torch

    from raydali.train.models.classification import build_model
    from raydali.train.models.normalized import Normalized
    from raydali.train.step import Precision

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
    from raydali.measure.meter import StageClock

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
