"""`raydali bench train`: how near training on real data comes to its ceiling, and where the distance goes.

    raydali bench train --data ~/imagenet/train --gpus 1,2,4 --models resnet50,resnet18 --json t.json --plot t.png
    raydali bench train --loaders raydali,native --no-split

The ceiling is the same step on one batch that lies on the device already. It is measured in the same processes as the
training, in turn with it, and what counts is the ratio of the two. No Ray is needed: the processes meet by themselves.
"""

import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from raydali.bench.common import shared_options
from raydali.bench.common.results import require_measured
from raydali.errors import UsageError
from raydali.output import JsonFile, devices, machine, show, write_json
from raydali.text import number

if TYPE_CHECKING:
    from raydali.bench.train.rank import TrainTask

CHOICE = ("raydali", "native", "torchvision", "synthetic")
COMMON_MODELS = ("resnet50", "resnet18", "digits")
"""That need not be looked up."""
POSITIVE = ("make", "batch_size", "image_size", "threads", "steps", "repeats")


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    """How near training on real data comes to its ceiling, the same step on a resident batch, and what it loses."""

    data: str | None = None
    """Folder of class folders of images. Default: made ones."""
    make: int | None = None
    """Without --data: how many images to make, noise like photographs, 130 KB each, in a temporary folder. Default:
    16384, or 512 for the CPU."""
    gpus: str | None = None
    """Numbers of GPUs, such as 1,2,4; 0 is the CPU alone. Default: 1, or 0 on a machine with no GPU."""
    models: str = "resnet50"
    """torchvision classification models by name, or digits, a small network; such as resnet50,resnet18."""
    loaders: str = "raydali"
    """Which to train with: raydali; native (DALI's own reader, in the loop that most write: default stream, no CUDA
    graph); torchvision (torch's DataLoader); synthetic (a resident batch, what the measuring itself costs)."""
    batch_size: int = 256
    """Images of a batch, for each GPU."""
    image_size: int = 224
    """Side of the square images that the model gets, in pixels."""
    threads: int = 8
    """Of DALI, or processes of torch's DataLoader, for each GPU."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the forward and backward pass; weights are kept in fp32."""
    compile: bool = True
    """Compile the model with torch.compile, on GPUs."""
    cuda_graph: bool = True
    """Replay forward and backward as one CUDA graph, on GPUs, but for the native loader."""
    steps: int = 60
    """Of each measured stretch."""
    repeats: int = 3
    """How often each stretch is measured, in turn; medians are reported."""
    split: bool = True
    """Measure where the distance goes too, which takes as long again."""
    timeout: float = 300.0
    """Seconds for each combination of model, loader and GPUs, its start and compilation included."""
    json: JsonFile = None
    plot: str | None = None
    """File for a picture of them, PNG."""


def main(options: TrainBench) -> dict[str, Any]:
    """Measure, show, write.

    Returns:
        What --json writes: {"command", "machine", "settings", "rows"}. A row: {"model", "loader", "gpus" (0: the
        CPU), "error", the figures of `train_split.figures`, "scaling", "communication"}. Null: not measured.

    Raises:
        UsageError: an option that cannot be met; before anything is measured.
        CommandFailed: a combination could not be measured; after the others' results were shown and written.
    """
    from raydali.bench.common.synthetic_images import photographs
    from raydali.bench.train.plot import plot
    from raydali.data.sources.image_folder import ImageFolder

    _check(options)
    counts = shared_options.gpu_counts(options.gpus)
    make = shared_options.to_make(options, max(counts))
    images = len(ImageFolder.scan(options.data)) if options.data is not None else make
    shared_options.check_images(options, images, max(counts))
    settings = asdict(options) | {"make": None if options.data else make, "images": images}
    rows: list[dict[str, Any]] = []
    result = {"command": "bench train", "machine": machine(), "settings": settings, "rows": rows}
    try:
        with photographs(options.data, make) as root:
            for gpus in counts:
                for model in shared_options.names(options.models):
                    for loader in shared_options.names(options.loaders):
                        rows.append(_measure(_task(options, root, model, loader, gpus), gpus, rows))
                        print(_line(rows[-1]), flush=True)
                        if options.json:
                            write_json(result, options.json)
    finally:
        if rows:
            _show_tables(result)
            if options.plot:
                plot(result, options.plot)
    require_measured(rows, _name)
    return result


def _check(options: TrainBench) -> None:
    shared_options.check(options, positive=POSITIVE, loaders=CHOICE)
    if not shared_options.names(options.models):
        raise UsageError("--models names none: give some such as resnet50,resnet18")
    for name in shared_options.names(options.models):
        if name not in COMMON_MODELS:
            from raydali.train.models.classification import check_model  # imports torchvision: seconds

            check_model(name)


def _task(options: TrainBench, root: str, model: str, loader: str, gpus: int) -> "TrainTask":
    from raydali.bench.loader.contenders import Task
    from raydali.bench.train.rank import TrainTask

    delivery = Task(
        loader=loader,
        root=root,
        batch_size=options.batch_size,
        image_size=options.image_size,
        threads=options.threads,
        workers=options.threads,
        seconds=0.0,
        gpu=gpus > 0,
        world_size=max(1, gpus),
    )
    return TrainTask(
        delivery=delivery,
        model=model,
        steps=options.steps,
        rounds=options.repeats,
        precision=options.precision,
        compile=options.compile,
        cuda_graph=options.cuda_graph,
        split=options.split,
        timeout=options.timeout,
    )


def _measure(task: "TrainTask", gpus: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    from raydali.bench.common.processes import RanksFailed, run_ranks
    from raydali.bench.train.breakdown import NOTHING, against_one_gpu, figures
    from raydali.bench.train.rank import measure

    row: dict[str, Any] = {"model": task.model, "loader": task.delivery.loader, "gpus": gpus, "error": None}
    print(f"{_name(row)} ...", file=sys.stderr, flush=True)
    try:
        row |= figures(run_ranks(measure, task, task.delivery.world_size, timeout=task.timeout)[0])
    except RanksFailed as error:
        row |= {"error": str(error), **NOTHING}
    return row | against_one_gpu(row, [*rows, row])


def _name(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['loader']}, {devices(row['gpus'])}"


def _line(row: dict[str, Any]) -> str:
    if row["error"]:
        return f"{_name(row)}: failed: {row['error'].strip().splitlines()[-1]}"
    real, ceiling = number(row["real_images_per_second"]), number(row["ceiling_images_per_second"])
    return f"{_name(row)}: real {real} of ceiling {ceiling} images/s, {number(row['of_ceiling'], '.3f')}"


def _show_tables(result: dict[str, Any]) -> None:
    settings, rows = result["settings"], result["rows"]
    show(
        f"{settings['images']:,} images to {settings['image_size']} x {settings['image_size']} pixels, batches of "
        f"{settings['batch_size']}, {settings['precision']}, {settings['threads']} threads; images/s",
        ("model, loader, on", "ceiling", "real", "real / ceiling", "lowest .. highest", "/ 1 GPU", "loader alone"),
        [
            (
                _name(row),
                number(row["ceiling_images_per_second"]),
                number(row["real_images_per_second"]),
                number(row["of_ceiling"], ".3f"),
                f"{number(row['of_ceiling_low'], '.3f')} .. {number(row['of_ceiling_high'], '.3f')}"
                if not row["error"]
                else "failed: see below",
                number(row["scaling"], ".2f"),
                number(row["loader_images_per_second"]),
            )
            for row in rows
        ],
    )
    show(
        "where the distance goes, in per cent of the time that a step takes at the ceiling; and what of the ceiling "
        "of single GPUs\ntheir communication takes",
        ("model, loader, on", *(title for title, _ in SPLIT_COLUMNS), "communication"),
        [
            (
                _name(row),
                *(number((row["split"] or {}).get(part), "+.1%") for _, part in SPLIT_COLUMNS),
                number(row["communication"], ".1%"),
            )
            for row in rows
        ],
    )


SPLIT_COLUMNS = (
    ("distance", "distance"),
    ("= data values", "data_values"),
    ("+ waiting", "waiting"),
    ("+ contention", "contention"),
    ("(GPU", "contention_gpu"),
    ("+ CPU)", "contention_cpu"),
    ("+ unexplained", "unexplained"),
)
"""Titles, and parts of `train_split.split`."""
