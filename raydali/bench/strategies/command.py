"""`raydali bench strategies`: what training on several GPUs, mixed precision and DALI bring, each by itself.

    raydali bench strategies --data ~/imagenet/train --gpus 4 --json s.json --plot s.png
    raydali bench strategies --strategies one,ddp --precisions amp --loaders dali

    one       one GPU
    dp        torch.nn.DataParallel: one process for all GPUs, one loader for all, its batches split and losses gathered
    ddp       DistributedDataParallel: a process a GPU, each with a loader of its own
    sync-bn   ddp with SyncBatchNorm

Each in fp32 (convolutions in TF32, torch's default) and amp (fp16 with a GradScaler), with Pillow in torch's DataLoader
and with DALI; eager, as the usual scripts are, and so no measure of what raydali's jobs do: `raydali bench train` is.
No job of raydali trains with DataParallel. Without a GPU one process and DDP with two of them are measured.
"""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from raydali.bench.common import shared_options
from raydali.bench.common.results import require_measured, spread
from raydali.bench.strategies.metrics import GIB, NOTHING, STRATEGIES, figures, strategy_name, to_one
from raydali.errors import UsageError
from raydali.output import JsonFile, devices, gpu_names, machine, show, write_json
from raydali.text import number

if TYPE_CHECKING:
    from raydali.bench.strategies.rank import StrategyTask

ON_CPU = ("one", "ddp")
CPU_PROCESSES = 2
"""Of DDP without a GPU."""
PRECISIONS = ("fp32", "amp")
LOADERS = ("torch", "dali")
POSITIVE = ("make", "batch_size", "image_size", "threads", "workers", "steps", "repeats")


@dataclass(frozen=True, kw_only=True)
class StrategiesBench:
    """One GPU, DataParallel, DDP, SyncBatchNorm, in fp32 and AMP, with torch's loader and DALI: what each brings."""

    data: str | None = None
    """Folder of class folders of images. Default: made ones."""
    make: int | None = None
    """Without --data: how many images to make, noise like photographs, 130 KB each, in a temporary folder. Default:
    16384, or 512 for the CPU."""
    gpus: int | None = None
    """Of all strategies but one. Default: all of the machine; 0 is the CPU alone."""
    model: str = "resnet50"
    """A torchvision classification model by name, or digits, a small network."""
    batch_size: int = 128
    """Images of a batch, for each GPU: DataParallel's one loader makes batches for all of them."""
    image_size: int = 224
    """Side of the square images that the model gets, in pixels."""
    threads: int = 8
    """Of DALI, for each GPU: DataParallel's one loader has those of all."""
    workers: int = 8
    """Processes of torch's DataLoader, for each GPU: DataParallel's one loader has those of all."""
    steps: int = 40
    """Of each measured stretch; with torch's DataLoader rounded up to whole turns of its workers."""
    repeats: int = 3
    """How many stretches are measured; medians are reported, and the lowest and the highest."""
    strategies: str = ",".join(STRATEGIES)
    """Which to measure. Those that need several GPUs are left out where there is one."""
    precisions: str = ",".join(PRECISIONS)
    """fp32, amp (fp16 with a GradScaler; without a GPU bf16)."""
    loaders: str = ",".join(LOADERS)
    """torch (Pillow in torch's DataLoader), dali."""
    timeout: float = 300.0
    """Seconds for each row, its start included."""
    json: JsonFile = None
    plot: str | None = None
    """File for a picture of them, PNG."""


def main(options: StrategiesBench) -> dict[str, Any]:
    """Measure, show, write.

    Returns:
        What --json writes: {"command", "machine", "settings", "rows"}. A row: {"strategy", "precision", "loader",
        "gpus" (0: the CPU), "processes", "error", the figures of `strategies_figures.figures`, "to_one" (its rate to
        that of strategy one in the same precision with the same loader)}. Null: not measured.

    Raises:
        UsageError: an option that cannot be met; before anything is measured.
        CommandFailed: a row could not be measured; after the others' results were shown and written.
    """
    from raydali.bench.common.synthetic_images import photographs
    from raydali.bench.strategies.plot import plot
    from raydali.data.sources.image_folder import ImageFolder

    wanted = _rows(options)
    gpus = max(row["gpus"] for row in wanted)
    make = shared_options.to_make(options, gpus)
    images = len(ImageFolder.scan(options.data)) if options.data is not None else make
    shared_options.check_images(options, images, gpus, max(row["processes"] for row in wanted))
    settings = asdict(options) | {"gpus": gpus, "make": None if options.data else make, "images": images}
    rows: list[dict[str, Any]] = []
    result = {"command": "bench strategies", "machine": machine(), "settings": settings, "rows": rows}
    try:
        with photographs(options.data, make) as root:
            for row in wanted:
                rows.append(_measure(_task(options, root, row), row, options.timeout))
                rows[-1]["to_one"] = to_one(rows[-1], rows)
                print(_line(rows[-1]), flush=True)
                if options.json:
                    write_json(result, options.json)
    finally:
        if rows:
            _show_table(result)
            if options.plot:
                plot(result, options.plot)
    require_measured(rows, name)
    return result


def _rows(options: StrategiesBench) -> list[dict[str, Any]]:
    """What is to be measured: rows without figures. What cannot be on so many GPUs is left out, which a line says."""
    shared_options.check(options, positive=POSITIVE, loaders=LOADERS)
    strategies = shared_options.chosen("strategies", options.strategies, STRATEGIES)
    precisions = shared_options.chosen("precisions", options.precisions, PRECISIONS)
    if options.model != "digits":
        from raydali.train.models.classification import check_model  # imports torchvision: seconds

        check_model(options.model)
    gpus = len(gpu_names()) if options.gpus is None else shared_options.gpu_counts(str(options.gpus))[0]
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
        for loader in shared_options.names(options.loaders)
    ]


def _task(options: StrategiesBench, root: str, row: dict[str, Any]) -> "StrategyTask":
    from raydali.bench.strategies.rank import StrategyTask

    gpus_each = max(1, row["gpus"] // row["processes"])
    return StrategyTask(
        root=root,
        strategy=row["strategy"],
        precision=row["precision"],
        loader=row["loader"],
        model=options.model,
        gpus=row["gpus"],
        processes=row["processes"],
        batch_size=options.batch_size * gpus_each,
        image_size=options.image_size,
        threads=gpus_each * (options.workers if row["loader"] == "torch" else options.threads),
        steps=options.steps,
        rounds=options.repeats,
    )


def _measure(task: "StrategyTask", row: dict[str, Any], timeout: float) -> dict[str, Any]:
    from raydali.bench.common.processes import RanksFailed, run_ranks
    from raydali.bench.strategies.rank import measure

    print(f"{name(row)} ...", file=sys.stderr, flush=True)
    try:
        return row | {"error": None} | figures(run_ranks(measure, task, task.processes, timeout=timeout)[0])
    except RanksFailed as error:
        return row | {"error": str(error)} | NOTHING


def name(row: dict[str, Any]) -> str:
    """A row in words."""
    return f"{strategy_name(row)}, {row['precision']}, {row['loader']}"


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{name(row)}: failed: {row['error'].strip().splitlines()[-1]}"
    return f"{name(row)}: {number(row['images_per_second'])} images/s"


def _show_table(result: dict[str, Any]) -> None:
    settings, rows = result["settings"], result["rows"]

    def memory(row: dict[str, Any], figure: str) -> str:
        return " ".join(f"{each[figure] / GIB:.1f}" for each in row["memory"] or []) or "-"

    show(
        f"{settings['model']}, {settings['images']:,} images to {settings['image_size']} x {settings['image_size']} "
        f"pixels, batches of {settings['batch_size']} a GPU, {settings['threads']} threads or {settings['workers']} "
        "workers a GPU\n"
        "GiB of each GPU: torch's peak (of its tensors), and all that is taken at the end (DALI, CUDA, NCCL, other "
        "programs too);\n"
        "balance: the smallest to the largest of the GPUs, in all that is taken, and in time computing for a step",
        (
            "strategy, precision, loader",
            "images/s",
            "lowest .. highest",
            "/ one",
            "no data",
            "GiB: torch",
            "GiB: all",
            "balance: GiB",
            "time",
        ),
        [
            (
                name(row),
                number(row["images_per_second"]),
                spread(row),
                number(row["to_one"], ".2f"),
                number(row["loader_wait_fraction"], ".0%"),
                memory(row, "allocated_bytes"),
                memory(row, "used_bytes"),
                number(row["memory_balance"], ".2f"),
                number(row["busy_balance"], ".2f"),
            )
            for row in rows
        ],
    )
