"""`raydali bench train`: how close training on real data comes to its ceiling.

    raydali bench train --data ~/imagenet/train --gpus 1,2,4 --models resnet50,resnet18 --json t.json
    raydali bench train --loaders raydali,native

The ceiling is the same step on one batch that is resident on the device. It is measured in the same processes as the
training, alternating with it; the result is the ratio of the two. Ray is not needed: the processes are started here.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from raydali.bench import common
from raydali.bench.common import TrainingOptions, cell, collect, measured_row, result_of, show_rows, spread, task_of
from raydali.data.augment.augmentation import Augmentation
from raydali.errors import UsageError
from raydali.output import devices
from raydali.text import number

CHOICE = ("raydali", "native", "torchvision", "synthetic")
COMMON_MODELS = ("resnet50", "resnet18", "digits")
"""Models that are accepted without importing torchvision."""


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
    if not common.names(options.models):
        raise UsageError("--models is empty: give some such as resnet50,resnet18")
    for model in common.names(options.models):
        if model not in COMMON_MODELS:
            from raydali.train.models.classification import check_model  # imports torchvision, which takes seconds

            check_model(model)
    counts = common.gpu_counts(options.gpus)
    settings = common.training_settings(options, max(counts))
    result = result_of("bench train", settings, [])
    rows = _rows(options, settings["make"] or 0, counts)
    return collect(result, rows, options, name=_name, line=_line, show_table=_show_table)


def _rows(options: TrainBench, make: int, counts: list[int]) -> Iterator[dict[str, Any]]:
    from raydali.bench.image_loaders import Task
    from raydali.bench.processes import run_ranks
    from raydali.bench.synthetic_images import synthetic_images
    from raydali.bench.train_rank import TrainTask, measure

    def measured() -> Any:
        world_size = max(1, gpus)
        loading = task_of(
            Task,
            options,
            loader=loader,
            root=root,
            workers=options.threads,
            seconds=0.0,
            gpu=gpus > 0,
            world_size=world_size,
        )
        task = task_of(TrainTask, options, loading=loading, model=model, rounds=options.repeats)
        return run_ranks(measure, task, world_size, timeout=options.timeout)[0]

    done: list[dict[str, Any]] = []
    with synthetic_images(options.data, make) as root:
        for gpus in counts:
            for model in common.names(options.models):
                for loader in common.names(options.loaders):
                    row: dict[str, Any] = {"model": model, "loader": loader, "gpus": gpus}
                    done.append(measured_row(row, _name(row), measured, METRICS))
                    yield done[-1] | against_one_gpu(done[-1], done)


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['loader']}, {devices(row['gpus'])}"


def _line(row: dict[str, Any]) -> str:
    real, ceiling = number(row["real_images_per_second"]), number(row["ceiling_images_per_second"])
    return f"{_name(row)}: real {real} of ceiling {ceiling} images/s, {number(row['of_ceiling'], '.3f')}"


def _show_table(result: dict[str, Any]) -> None:
    settings = result["settings"]
    show_rows(
        f"{settings['images']:,} images to {settings['image_size']} x {settings['image_size']} pixels, batches of "
        f"{settings['batch_size']}, {settings['precision']}, {settings['threads']} threads; images/s",
        {
            "model, loader, on": _name,
            "ceiling": cell("ceiling_images_per_second"),
            "real": cell("real_images_per_second"),
            "real / ceiling": cell("of_ceiling", ".3f"),
            "lowest .. highest": lambda row: spread(row, "of_ceiling_low", "of_ceiling_high", ".3f"),
            "waiting": cell("loader_wait_fraction", ".1%"),
            "/ 1 GPU": cell("scaling", ".2f"),
            "communication": cell("communication", ".1%"),
            "loader alone": cell("loader_images_per_second"),
        },
        result["rows"],
    )


def _median(name: str, figure: str = "images_per_second") -> Callable[[dict[str, Any]], float]:
    return lambda measured: statistics.median(each[name][figure] for each in measured["rounds"])


def _of_ceiling(measured: dict[str, Any]) -> list[float]:
    return [each["real"]["images_per_second"] / each["ceiling"]["images_per_second"] for each in measured["rounds"]]


METRICS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "ceiling_images_per_second": _median("ceiling"),
    "real_images_per_second": _median("real"),
    "loader_images_per_second": _median("alone"),
    "ceiling_before_images_per_second": lambda measured: measured["ceiling_before"]["images_per_second"],
    "of_ceiling": lambda measured: statistics.median(_of_ceiling(measured)),
    "of_ceiling_low": lambda measured: min(_of_ceiling(measured)),
    "of_ceiling_high": lambda measured: max(_of_ceiling(measured)),
    "loader_wait_fraction": _median("real", "loader_wait_fraction"),
    "host_wait_fraction": _median("real", "host_wait_fraction"),
    "rounds": lambda measured: measured["rounds"],
}
"""Metrics of a row, computed from what rank 0 returns: rates in images per second over all GPUs, medians of the rounds.
The fractions are shares of the time in which the device, or the host, waited for data."""


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
