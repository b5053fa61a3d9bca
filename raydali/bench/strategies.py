"""`raydali bench strategies`: the separate effects of several GPUs, mixed precision and DALI on training.

    raydali bench strategies --data ~/imagenet/train --gpus 4 --json s.json
    raydali bench strategies --strategies one,ddp --precisions amp --loaders dali

    one       one GPU
    dp        torch.nn.DataParallel: one process and one loader for all GPUs; batches are split, losses gathered
    ddp       DistributedDataParallel: a process per GPU, each with its own loader
    sync-bn   ddp with SyncBatchNorm

Each runs in fp32 (convolutions in TF32, torch's default) and amp (fp16 with a GradScaler), with Pillow in torch's
DataLoader and with DALI. Forward and backward pass are a CUDA graph, as in raydali's jobs, except with DataParallel,
which cannot be captured; ddp takes DDP or one all-reduce after the pass, whichever is faster. Nothing is compiled, so
these rates differ from the jobs' rates: see `raydali bench train`. Without a GPU one process and DDP with two are
measured.

Each process takes steps on one resident batch before the loader starts, for tuning and DDP's buckets, then steps on
the loader's batches that do not count, and then the timed segments.
"""

import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from raydali.bench import common
from raydali.bench.common import Row, cell, ratio, spread
from raydali.bench.train import TrainingOptions, check_classifier, measure_rows, training_settings
from raydali.errors import UsageError
from raydali.output import devices, gpu_names

if TYPE_CHECKING:
    from raydali.bench.train_rank import TrainTask
    from raydali.host.hardware import PrecisionName

STRATEGIES = {"one": "one GPU", "dp": "DataParallel", "ddp": "DDP", "sync-bn": "DDP + SyncBatchNorm"}
"""The names that --strategies accepts, and what each is called in tables."""
ON_CPU = ("one", "ddp")
CPU_PROCESSES = 2
"""Processes of DDP without a GPU."""
PRECISIONS = ("fp32", "amp")
LOADERS = ("torch", "dali")


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
    """Worker processes of torch's DataLoader per GPU. DataParallel has one loader with the workers of all GPUs."""
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
    rows = _rows(options)
    gpus = max(row["gpus"] for row in rows)
    settings = training_settings(options, gpus, max(row["processes"] for row in rows)) | {"gpus": gpus}
    title = (
        f"{options.model}, {settings['images']:,} images to {options.image_size} x {options.image_size} pixels, "
        f"batches of {options.batch_size} per GPU, {options.threads} threads or {options.workers} workers per GPU"
    )
    result = common.result_of("bench strategies", settings, rows)
    measure_rows(result, options, partial(_task, options), METRICS, title, COLUMNS, to_one)
    return result


def _task(options: StrategiesBench, root: str, row: Row) -> "TrainTask":
    """Return the task of a row's processes. DataParallel's one loader makes the batches of all GPUs."""
    from raydali.bench.train_rank import TrainTask

    per_process = max(1, row["gpus"] // row["processes"])
    torch = row["loader"] == "torch"
    workers, threads = per_process * options.workers, per_process * options.threads
    precision: PrecisionName = "fp32"
    if row["precision"] == "amp":  # CPUs take many times as long in fp16; DataParallel's replicas support no other one
        precision = "fp16" if row["gpus"] else "bf16"
    return TrainTask(
        loader="torch" if torch else "raydali",
        root=root,
        batch_size=options.batch_size * per_process,
        image_size=options.image_size,
        threads=workers if torch else threads,
        workers=0,
        seconds=0.0,
        gpu=row["gpus"] > 0,
        world_size=row["processes"],
        model=options.model,
        # With the DataLoader whole turns of its workers, whose batches come in bursts.
        steps=-(-options.steps // workers) * workers if torch else options.steps,
        rounds=options.repeats,
        precision=precision,
        strategy=row["strategy"],
        cuda_graph=row["strategy"] != "dp",
        gpus=row["gpus"],
        segments=("real",),
    )


def _rows(options: StrategiesBench) -> list[dict[str, Any]]:
    """List the rows to measure, without metrics; a message names the strategies that need more GPUs."""
    common.check(options, loaders=LOADERS, strategies=STRATEGIES, precisions=PRECISIONS)
    strategies, precisions = common.names(options.strategies), common.names(options.precisions)
    check_classifier(options.model)
    gpus = len(gpu_names()) if options.gpus is None else common.gpu_counts(str(options.gpus))[0]
    possible = STRATEGIES if gpus > 1 else ON_CPU if not gpus else ("one",)
    left_out = [STRATEGIES[strategy] for strategy in strategies if strategy not in possible]
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


def to_one(row: Row, rows: Iterable[Row]) -> Row:
    """Return {"to_one": the ratio of a row's rate to strategy one's with the same precision and loader, or None}."""
    same = ("one", row["precision"], row["loader"])
    ones = (other for other in rows if (other["strategy"], other["precision"], other["loader"]) == same)
    one = next(ones, {"images_per_second": None})
    return {"to_one": ratio(row["images_per_second"], one["images_per_second"])}


def _name(row: dict[str, Any]) -> str:
    return f"{strategy_name(row)}, {row['precision']}, {row['loader']}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "strategy, precision, loader": _name,
    "images/s": cell("images_per_second"),
    "lowest .. highest": spread,
    "/ one": cell("to_one", ".2f"),
    "no data": cell("loader_wait_fraction", ".0%"),
    "captured": lambda row: {True: "yes", False: "no"}.get(row["captured"], ""),
}


def _of_real(measured: dict[str, Any], figure: str = "images_per_second") -> list[float]:
    return [rates["real"][figure] for rates in measured["rounds"]]


METRICS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "images_per_second": lambda measured: statistics.median(_of_real(measured)),
    "low": lambda measured: min(_of_real(measured)),
    "high": lambda measured: max(_of_real(measured)),
    "repeats": _of_real,
    "loader_wait_fraction": lambda measured: statistics.median(_of_real(measured, "loader_wait_fraction")),
    "captured": lambda measured: measured["captured"],
}
"""Metrics of a row, computed from what rank 0 returns. Rates are of all GPUs; loader_wait_fraction is the share of the
time in which GPUs had no data; captured is whether forward and backward pass were a CUDA graph."""
