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
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from raydali.bench.common import options as common
from raydali.bench.common.options import TrainingOptions
from raydali.bench.common.results import cell, collect, measured_row, result_of, show_rows, spread, task_of
from raydali.bench.strategies.metrics import GIB, METRICS, STRATEGIES, strategy_name, to_one
from raydali.errors import UsageError
from raydali.output import devices, gpu_names
from raydali.text import number

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
        "gpus" (0: the CPU), "processes", "error", the metrics of metrics.py, "to_one" (the ratio of its rate to
        that of strategy one with the same precision and loader)}. Null: not measured.

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
    from raydali.bench.common.processes import run_ranks
    from raydali.bench.common.synthetic_images import synthetic_images
    from raydali.bench.strategies.rank import StrategyTask, measure_strategy

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
        "programs);\n"
        "balance: the smallest to the largest of the GPUs, in memory in use and in computing time per step",
        {
            "strategy, precision, loader": _name,
            "images/s": cell("images_per_second"),
            "lowest .. highest": spread,
            "/ one": cell("to_one", ".2f"),
            "no data": cell("loader_wait_fraction", ".0%"),
            "GiB: torch": memory("allocated_bytes"),
            "GiB: all": memory("used_bytes"),
            "balance: GiB": cell("memory_balance", ".2f"),
            "time": cell("busy_balance", ".2f"),
        },
        rows,
    )
