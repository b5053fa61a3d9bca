"""`raydali bench train`: how close training on real data comes to its ceiling, and what causes the difference.

    raydali bench train --data ~/imagenet/train --gpus 1,2,4 --models resnet50,resnet18 --json t.json --plot t.png
    raydali bench train --loaders raydali,native --no-split

The ceiling is the same step on one batch that is resident on the device. It is measured in the same processes as the
training, alternating with it; the result is the ratio of the two. Ray is not needed: the processes are started here.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from raydali.bench.common import options as common
from raydali.bench.common.options import TrainingOptions
from raydali.bench.common.results import cell, collect, measured_row, result_of, show_rows, spread, task_of
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
    split: bool = True
    """Also measure the causes of the difference, which doubles the duration."""


def main(options: TrainBench) -> dict[str, Any]:
    """Measure each combination, show the tables and write the files.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows"}. A row: {"model", "loader", "gpus" (0: the
        CPU), "error", the metrics of breakdown.py, "scaling", "communication"}. Null: not measured.

    Raises:
        UsageError: an option is invalid; before anything is measured.
        CommandError: a combination could not be measured; after the other results were shown and written.
    """
    from raydali.bench.train.plot import plot

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
    return collect(result, rows, options, name=_name, line=_line, show_table=_show_tables, plot=plot)


def _rows(options: TrainBench, make: int, counts: list[int]) -> Iterator[dict[str, Any]]:
    from raydali.bench.common.processes import run_ranks
    from raydali.bench.common.synthetic_images import synthetic_images
    from raydali.bench.loader.contenders import Task
    from raydali.bench.train.breakdown import METRICS, against_one_gpu
    from raydali.bench.train.rank import TrainTask, measure

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


def _show_tables(result: dict[str, Any]) -> None:
    settings, rows = result["settings"], result["rows"]
    show_rows(
        f"{settings['images']:,} images to {settings['image_size']} x {settings['image_size']} pixels, batches of "
        f"{settings['batch_size']}, {settings['precision']}, {settings['threads']} threads; images/s",
        {
            "model, loader, on": _name,
            "ceiling": cell("ceiling_images_per_second"),
            "real": cell("real_images_per_second"),
            "real / ceiling": cell("of_ceiling", ".3f"),
            "lowest .. highest": lambda row: spread(row, "of_ceiling_low", "of_ceiling_high", ".3f"),
            "/ 1 GPU": cell("scaling", ".2f"),
            "loader alone": cell("loader_images_per_second"),
        },
        rows,
    )

    def part(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: number((row["split"] or {}).get(name), "+.1%")

    show_rows(
        "where the difference goes, in per cent of the time of a step at the ceiling; and the share of the ceiling of "
        "single GPUs\nthat their communication takes",
        {
            "model, loader, on": _name,
            "distance": part("distance"),
            "= data values": part("data_values"),
            "+ waiting": part("waiting"),
            "+ contention": part("contention"),
            "(GPU": part("contention_gpu"),
            "+ CPU)": part("contention_cpu"),
            "+ unexplained": part("unexplained"),
            "communication": cell("communication", ".1%"),
        },
        rows,
    )
