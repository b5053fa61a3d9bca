"""`raydali bench train`: how close training on real data comes to its ceiling.

    raydali bench train --data ~/imagenet/train --gpus 1,2,4 --models resnet50,resnet18 --json t.json
    raydali bench train --loaders raydali,native

The ceiling is the same step on one batch that is resident on the device. It is measured in the same processes as the
training, alternating with it; the result is the ratio of the two. Ray is not needed: the processes are started here.
"""

import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench import common, synthetic
from raydali.bench.common import BenchOptions, Row, cell, spread
from raydali.bench.processes import MeasurementError
from raydali.errors import UsageError
from raydali.output import devices
from raydali.text import error_line, number

if TYPE_CHECKING:
    from raydali.bench.train_rank import TrainTask

MAKE_FOR_GPU, MAKE_FOR_CPU = 16384, 512
"""Default number of synthetic images to train on."""
CHOICE = ("raydali", "native", "torchvision", "synthetic")
ROW = ("model", "loader", "micro_batches", "network")
"""The fields in which rows differ, besides the number of GPUs."""
NETWORKS = ("whole", "sharded", "whole+recomputed", "sharded+recomputed")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(BenchOptions):
    """Options of the benchmarks that train."""

    make: int | None = None
    """Without --data: number of synthetic images, 130 KB each, in a temporary folder. Default: 16384, or 512 for the
    CPU."""
    steps: int = 60
    """Steps of each measured segment."""
    timeout: float = 300.0
    """Maximum seconds per row, start-up and compilation included."""


@dataclass(frozen=True, kw_only=True)
class TrainBench(TrainingOptions):
    """Measure how close training on real data comes to its ceiling, the same step on a resident batch."""

    models: str = "resnet50"
    """torchvision classification models by name, timm:NAME, or digits, a small network; such as resnet50,resnet18."""
    networks: str = "whole"
    """How GPUs hold the model: whole (DDP) or sharded (FSDP2), as with --shard; each with +recomputed, as with
    --activation-checkpointing; such as whole,sharded,sharded+recomputed."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """Optimizer of the step."""
    loaders: str = "raydali"
    """Loaders to train with: raydali; native (DALI's own reader in the usual loop: default stream, no CUDA graph);
    torchvision (torch's DataLoader); synthetic (a resident batch: the cost of measuring)."""
    threads: int = 8
    """DALI threads, or worker processes of torch's DataLoader, per GPU."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Precision of the forward and backward pass; weights are kept in fp32."""
    compile: bool = True
    """Compile the model with torch.compile, on GPUs."""
    fused: bool | None = None
    """Compute BatchNorm, addition and ReLU of compiled models in one operation, on GPUs. Default: yes."""
    cuda_graph: bool = True
    """Replay forward and backward as one CUDA graph, on GPUs, except for the native loader."""
    overlap: bool | None = None
    """All-reduce gradients during the backward pass, as DDP does, or after it. Default: during it on GPUs."""
    micro_batches: str = "1"
    """Numbers of micro-batches of each GPU in a step, such as 1,3; a batch is a micro-batch."""
    augment: str = "none"
    """Policy of augmentation of raydali's batches, as in jobs; the ceiling has none."""
    erase: float | None = None
    """Probability of random erasing of raydali's batches. Default: 0."""


def main(options: TrainBench) -> dict[str, Any]:
    """Measure each combination, show the tables and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"model", "loader", "gpus" (0: the
        CPU), "network", "micro_batches" of each, "error", METRICS, "scaling", "communication"}. Null: not measured.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a combination could not be measured; after the other results were shown and written.
    """
    from raydali.data.augment.augmentation import Augmentation

    common.check(options, loaders=CHOICE, networks=NETWORKS)
    Augmentation(options.augment, options.erase or 0)
    if options.fused and not options.compile:
        raise UsageError("--fused needs --compile, which puts fused operations into the model: leave --no-compile out")
    options = replace(options, fused=options.compile and options.fused is not False)
    models, loaders, networks = map(common.names, (options.models, options.loaders, options.networks))
    if options.precision == "fp16" and any("sharded" in network for network in networks):
        raise UsageError("--networks sharded cannot scale losses, which --precision fp16 needs: give bf16 or fp32")
    if not models:
        raise UsageError("--models is empty: give some such as resnet50,resnet18")
    for model in models:
        check_classifier(model)
    counts = common.gpu_counts(options.gpus)
    settings = training_settings(options, max(counts))
    several = common.integers(options.micro_batches)
    if not several or several[0] < 1:
        raise UsageError(f"--micro-batches must be numbers such as 1,3, not {options.micro_batches!r}")
    rows = [
        dict(zip(("gpus", *ROW), of_row, strict=True)) for of_row in product(counts, models, loaders, several, networks)
    ]
    title = (
        f"{settings['images']:,} images to {options.image_size} x {options.image_size} pixels, batches of "
        f"{options.batch_size}, {options.precision}, {options.threads} threads; images/s"
    )
    result = common.result_of("bench train", settings, rows)
    measure_rows(result, options, partial(_task, options), METRICS, title, COLUMNS, against_one_gpu)
    return result


def _task(options: TrainBench, root: str, row: Row) -> "TrainTask":
    from raydali.bench.train_rank import TrainTask

    return common.task_of(
        TrainTask,
        options,
        model=row["model"],
        loader=row["loader"],
        micro_batches=row["micro_batches"],
        strategy="shard" if "sharded" in row["network"] else "ddp",
        recomputed="recomputed" in row["network"],
        root=root,
        workers=options.threads,
        seconds=0.0,
        gpu=row["gpus"] > 0,
        gpus=row["gpus"],
        world_size=max(1, row["gpus"]),
        rounds=options.repeats,
    )


def _name(row: dict[str, Any]) -> str:
    several = f", {row['micro_batches']} micro-batches a step" if row["micro_batches"] > 1 else ""
    network = "" if row["network"] == "whole" else f", {row['network']}"
    return f"{row['model']}, {row['loader']}, {devices(row['gpus'])}{several}{network}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model, loader, on": _name,
    "ceiling": cell("ceiling_images_per_second"),
    "real": cell("real_images_per_second"),
    "real / ceiling": cell("of_ceiling", ".3f"),
    "lowest .. highest": lambda row: spread(row, "of_ceiling_low", "of_ceiling_high", ".3f"),
    "waiting": cell("loader_wait_fraction", ".1%"),
    "MFU": cell("mfu", ".3f"),
    "GiB": cell("memory_gib", ".1f"),
    "/ 1 GPU": cell("scaling", ".2f"),
    "communication": cell("communication", ".1%"),
    "loader alone": cell("loader_images_per_second"),
}


def _median(name: str, figure: str = "images_per_second") -> Callable[[dict[str, Any]], float]:
    return lambda measured: statistics.median(rates[name][figure] for rates in measured["rounds"])


def _of_ceiling(measured: dict[str, Any]) -> list[float]:
    return [rates["real"]["images_per_second"] / rates["ceiling"]["images_per_second"] for rates in measured["rounds"]]


METRICS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "real_images_per_second": _median("real"),
    "ceiling_images_per_second": _median("ceiling"),
    "loader_images_per_second": _median("alone"),
    "ceiling_before_images_per_second": lambda measured: measured["ceiling_before"]["images_per_second"],
    "of_ceiling": lambda measured: statistics.median(_of_ceiling(measured)),
    "of_ceiling_low": lambda measured: min(_of_ceiling(measured)),
    "of_ceiling_high": lambda measured: max(_of_ceiling(measured)),
    "loader_wait_fraction": _median("real", "loader_wait_fraction"),
    "rounds": lambda measured: measured["rounds"],
    "captured": lambda measured: measured["captured"],
    "mfu": lambda measured: measured["peak"] and _median("ceiling")(measured) * measured["flops"] / measured["peak"],
    "memory_gib": lambda measured: measured["memory"] and measured["memory"] / 2**30,
}
"""Metrics of a row, computed from what rank 0 returns: rates in images per second over all GPUs, medians of the rounds.
loader_wait_fraction is the share of the time in which the device waited for data. The MFU is that of the ceiling; the
memory is the largest of any GPU, without that of DALI. Both are null on a CPU."""


def against_one_gpu(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> dict[str, float | None]:
    """Compare a row with the same model and loader on one GPU; null if that was not measured.

    Returns:
        "scaling": the ratio of the rates of real training. "communication": the share of the ceiling that the GPUs lose
        together, compared with as many single ones; mostly in the all-reduce.
    """
    of_one = {"gpus": 1, "error": None}
    same = {name: row[name] for name in ROW} | of_one
    one = next((other for other in rows if same.items() <= other.items()), None)
    if one is None or row["error"] is not None or not row["gpus"]:
        return {"scaling": None, "communication": None}
    together = row["ceiling_images_per_second"] / (row["gpus"] * one["ceiling_images_per_second"])
    return {
        "scaling": row["real_images_per_second"] / one["real_images_per_second"],
        "communication": 1 - together,
    }


# Shared with `raydali bench strategies`.


def check_classifier(model: str) -> None:
    """Check the name of a model; imports torchvision, which takes seconds, only for uncommon ones.

    Raises:
        UsageError: there is no such model.
    """
    if model not in ("resnet50", "resnet18", "digits"):
        from raydali.training.models.classification import check_model

        check_model(model)


def training_settings(options: TrainingOptions, gpus: int, processes: int = 1) -> dict[str, Any]:
    """Complete the options by the number of images: "make" (null with --data) and "images".

    Raises:
        UsageError: the data is missing, or has too few images for a batch of each GPU or process.
    """
    from raydali.data.index.labeled import LabeledFiles

    make = options.make or (MAKE_FOR_GPU if gpus else MAKE_FOR_CPU)
    images = len(LabeledFiles.scan(options.data)) if options.data is not None else make
    common.check_samples(options, images, max(gpus, processes), devices(gpus))
    return asdict(options) | {"make": None if options.data else make, "images": images}


def measure_rows(
    result: dict[str, Any],
    options: TrainingOptions,
    task: Callable[[str, Row], "TrainTask"],
    metrics: Mapping[str, Callable[[Any], Any]],
    title: str,
    columns: Mapping[str, Callable[[Row], str]],
    compare: Callable[[Row, list[Row]], Row],
) -> None:
    """Measure the rows of a result one after the other, show and write those that were, also after an interruption.

    Args:
        result: its rows get "error", the metrics, and what `compare` returns.
        options: the data, the timeout and --json.
        task: returns the task of a row's processes, for a folder of images.
        metrics: functions of what `measure` returned; the first one is the rate in images per second that is printed.
        title: of the table.
        columns: of the table; the first one is the name of a row.
        compare: compares a row with all of them.

    Raises:
        CommandError: a row could not be measured. Its metrics are null.
    """
    from raydali.bench.processes import run_ranks
    from raydali.bench.train_rank import measure

    name, done = next(iter(columns.values())), list[Row]()
    write = partial(synthetic.write_images, count=result["settings"]["make"])
    try:
        with synthetic.folder_or(options.data, write) as root:
            for row in result["rows"]:
                print(f"{name(row)} ...", file=sys.stderr, flush=True)
                wanted = task(root, row)
                try:
                    measured = run_ranks(measure, wanted, wanted.world_size, timeout=options.timeout)[0]
                    row |= {"error": None} | {key: metric(measured) for key, metric in metrics.items()}
                    outcome = f"{number(row[next(iter(metrics))])} images/s"
                except MeasurementError as error:
                    row |= {"error": str(error)} | dict.fromkeys(metrics)
                    outcome = f"failed: {error_line(error)}"
                print(f"{name(row)}: {outcome}", flush=True)
                done.append(row)
    finally:
        result["rows"] = [row | compare(row, done) for row in done]
        if done:
            common.present(result, options, title, columns)
    common.require_measured(done, name)
