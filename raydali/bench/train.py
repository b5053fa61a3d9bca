"""`raydali bench train`: how close training on real data comes to its ceiling.

    raydali bench train --data ~/imagenet/train --gpus 1,2,4 --models resnet50,resnet18 --json t.json
    raydali bench train --loaders raydali,native

The ceiling is the same step on one batch that is resident on the device. It is measured in the same processes as the
training, alternating with it; the result is the ratio of the two. Ray is not needed: the processes are started here.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from raydali.bench import common, synthetic
from raydali.bench.common import TrainingOptions, cell, spread
from raydali.data.augment.augmentation import Augmentation
from raydali.errors import UsageError
from raydali.output import devices

CHOICE = ("raydali", "native", "torchvision", "synthetic")


@dataclass(frozen=True, kw_only=True)
class TrainBench(TrainingOptions):
    """Measure how close training on real data comes to its ceiling, the same step on a resident batch."""

    models: str = "resnet50"
    """torchvision classification models by name, or digits, a small network; such as resnet50,resnet18."""
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
    augment: str = "none"
    """Policy of augmentation of raydali's batches, as in jobs; the ceiling has none."""
    erase: float | None = None
    """Probability of random erasing of raydali's batches. Default: 0."""


def main(options: TrainBench) -> dict[str, Any]:
    """Measure each combination, show the tables and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"model", "loader", "gpus" (0: the
        CPU), "error", METRICS, "scaling", "communication"}. Null: not measured.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a combination could not be measured; after the other results were shown and written.
    """
    common.check(options, loaders=CHOICE)
    Augmentation(options.augment, options.erase or 0)
    if options.fused and not options.compile:
        raise UsageError("--fused needs --compile, which puts fused operations into the model: leave --no-compile out")
    options = replace(options, fused=options.compile and options.fused is not False)
    models, loaders = common.names(options.models), common.names(options.loaders)
    if not models:
        raise UsageError("--models is empty: give some such as resnet50,resnet18")
    for model in models:
        common.check_classifier(model)
    counts = common.gpu_counts(options.gpus)
    settings = common.training_settings(options, max(counts))
    rows = [
        {"model": model, "loader": loader, "gpus": gpus} for gpus in counts for model in models for loader in loaders
    ]
    result = common.result_of("bench train", settings, [])

    def finish(measured: list[dict[str, Any]]) -> None:
        result["rows"] = [row | against_one_gpu(row, measured) for row in measured]
        title = (
            f"{settings['images']:,} images to {options.image_size} x {options.image_size} pixels, batches of "
            f"{options.batch_size}, {options.precision}, {options.threads} threads; images/s"
        )
        common.present(result, options, title, COLUMNS)

    write = partial(synthetic.write_images, count=settings["make"])
    with synthetic.folder_or(options.data, write) as root:
        common.measure_rows(rows, partial(_measured, options, root), METRICS, _name, finish)
    return result


def _measured(options: TrainBench, root: str, row: dict[str, Any]) -> Any:
    from raydali.bench.processes import run_ranks
    from raydali.bench.train_rank import TrainTask, measure

    task = common.task_of(
        TrainTask,
        options,
        model=row["model"],
        loader=row["loader"],
        root=root,
        workers=options.threads,
        seconds=0.0,
        gpu=row["gpus"] > 0,
        gpus=row["gpus"],
        world_size=max(1, row["gpus"]),
        rounds=options.repeats,
    )
    return run_ranks(measure, task, task.world_size, timeout=options.timeout)[0]


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['loader']}, {devices(row['gpus'])}"


COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "model, loader, on": _name,
    "ceiling": cell("ceiling_images_per_second"),
    "real": cell("real_images_per_second"),
    "real / ceiling": cell("of_ceiling", ".3f"),
    "lowest .. highest": lambda row: spread(row, "of_ceiling_low", "of_ceiling_high", ".3f"),
    "waiting": cell("loader_wait_fraction", ".1%"),
    "/ 1 GPU": cell("scaling", ".2f"),
    "communication": cell("communication", ".1%"),
    "loader alone": cell("loader_images_per_second"),
}


def _median(name: str, figure: str = "images_per_second") -> Callable[[dict[str, Any]], float]:
    return lambda measured: statistics.median(each[name][figure] for each in measured["rounds"])


def _of_ceiling(measured: dict[str, Any]) -> list[float]:
    return [each["real"]["images_per_second"] / each["ceiling"]["images_per_second"] for each in measured["rounds"]]


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
}
"""Metrics of a row, computed from what rank 0 returns: rates in images per second over all GPUs, medians of the rounds.
loader_wait_fraction is the share of the time in which the device waited for data."""


def against_one_gpu(row: dict[str, Any], rows: Iterable[dict[str, Any]]) -> dict[str, float | None]:
    """Compare a row with the same model and loader on one GPU; null if that was not measured.

    Returns:
        "scaling": the ratio of the rates of real training. "communication": the share of the ceiling that the GPUs lose
        together, compared with as many single ones; mostly in the all-reduce.
    """
    same = (row["model"], row["loader"], 1, None)
    one = next((each for each in rows if (each["model"], each["loader"], each["gpus"], each["error"]) == same), None)
    if one is None or row["error"] is not None or not row["gpus"]:
        return {"scaling": None, "communication": None}
    together = row["ceiling_images_per_second"] / (row["gpus"] * one["ceiling_images_per_second"])
    return {
        "scaling": row["real_images_per_second"] / one["real_images_per_second"],
        "communication": 1 - together,
    }
