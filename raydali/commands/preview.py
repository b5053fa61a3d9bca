"""`raydali preview`: draw the first batch of each rank as one picture.

    raydali preview --data ~/imagenet --workers 4
    raydali preview --data train.csv --val-fraction 0.1 --pipeline val --workers 2 -o sheet.html
    raydali preview --job my_job.py --data ~/imagenet --augment trivial --erase 0.25

The data, the pipelines and all other options are a job's. A loader for each rank delivers its first batch as in
training: with the same seed and batch size, the order, the crops, the flips and the augmentation are the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from raydali.data.index.source import Source, classes_of
from raydali.errors import DataError, UsageError
from raydali.extras import default_loader
from raydali.host.cpu_times import usable_cores
from raydali.output import devices, gpu_names, require_writable, write_output
from raydali.text import plural

if TYPE_CHECKING:
    import torch

    from raydali.data.load.loader import Batch
    from raydali.data.stream.stream import Order
    from raydali.report.contact_sheet import Picture, Sheet

MAX_WORKERS = 64
"""Maximum number of rows of a legible picture."""
MAX_SHOWN = 32
USUAL = "--batch-size", "8"
"""Options of the job that have another default here."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Draw the first batch of each rank as one picture, and check that no id appears twice.

    All other options are the job's, such as --data, --batch-size, --image-size and --augment.
    """

    job: str = "imagenet"
    """Name of a job, or a file such as my_job.py: its data and pipelines are drawn."""
    pipeline: Literal["train", "val"] = "train"
    """train: shuffled, with random crops and flips; val: in order, as in validation."""
    workers: int = 2
    """Number of ranks; each is a row of the picture."""
    show: int = 8
    """Number of images of each batch to draw, from the first."""
    device: str | None = None
    """Device that decodes images: cpu, or the number of a GPU. Default: 0, or cpu on a machine without a GPU."""
    output: Annotated[str, tyro.conf.arg(aliases=["-o"])] = "sheet.png"
    """File for the picture: .png, or .html with searchable names."""
    of_job: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Options of the job, as on its command line."""


def main(options: Preview) -> None:
    """Load the batches, write the picture and print the verdict.

    Raises:
        UsageError: an option is invalid; nothing was loaded.
        DataError: an image cannot be read, or an id appears twice; in the second case the picture was written.
    """
    from raydali.report.contact_sheet import as_html, as_png

    ending = Path(options.output).suffix.lower()
    require_writable("--output", options.output)
    if ending not in (".png", ".html"):
        raise UsageError(f"--output must end in .png or .html, not {options.output}")
    device = device_of(options.device)
    for name, most in (("workers", MAX_WORKERS), ("show", MAX_SHOWN)):
        if not 1 <= getattr(options, name) <= most:
            raise UsageError(f"--{name} must be from 1 to {most}, not {getattr(options, name)}")
    sheet = _sheet(options, device)
    write_output(options.output, as_png(sheet) if ending == ".png" else as_html(sheet))
    print(f"{options.output}: the first batch of {_ranks(options.workers)}: {sheet.verdict}")
    if not sheet.good:
        raise DataError(f"{sheet.verdict}: each must occur once")


def device_of(asked: str | None) -> str:
    """Return the name in torch of the device that --device asks for."""
    available = len(gpu_names())
    asked = asked or ("0" if available else "cpu")
    if asked == "cpu":
        return asked
    if not asked.isdecimal():
        raise UsageError(f"--device must be cpu or the number of a GPU from 0, not {asked}")
    if int(asked) >= available:
        there = f"has {devices(available)}, numbered from 0" if available else "has no GPU that CUDA can use"
        raise UsageError(f"--device {asked}: this machine {there}: give cpu or a lower number")
    return f"cuda:{int(asked)}"


def _sheet(options: Preview, device: str) -> "Sheet":
    from raydali.data.load.make import make_loader
    from raydali.data.stream.stream import Once
    from raydali.inference.job_module import load_job
    from raydali.launch.driver.command import parse
    from raydali.launch.driver.job_file import find_job
    from raydali.options.defaults import resolve
    from raydali.report.contact_sheet import Row, Sheet

    job = load_job(find_job(options.job))
    arguments = [*USUAL, *options.of_job]  # of an option that is given twice, the last one counts
    config = resolve(parse(job.config, arguments, "raydali preview", demo=job.demo, fine_tuning=job.fine_tuning), {})
    is_train = options.pipeline == "train"
    pipeline: Any = (job.train_pipeline if is_train else job.val_pipeline)(config)
    data = job.open_data(config)
    source: Any = data.train if is_train else data.val
    order = _order(options, config, len(source))
    make = make_loader if job.loader is None else job.loader(config)
    shared: dict[str, Any] = {"world_size": options.workers, "device": device, "threads": usable_cores()}
    rows, ids, size = [], [], ""
    for rank in range(options.workers):
        first = next(order.micro_batches(rank, options.workers))  # nothing more is prefetched
        once = Once([*zip(first.ids.tolist(), first.draw_keys.tolist(), strict=True)])
        with make(default_loader(), source, pipeline, once, rank=rank, **shared) as loader:
            (batch,) = loader
        pictures, of_batch = _pictures(source, batch, pipeline.outputs[0], options.show), batch.ids.tolist()
        shown, count = len(pictures), len(of_batch)
        caption = plural(count, "image") if shown == count else f"first {shown} of {count}"
        rows.append(Row(f"rank {rank}", caption, pictures))
        ids.append(of_batch)
        size = " x ".join(map(str, pictures[0].pixels.shape[:2]))
    twice = {id: count for id, count in Counter(id for of_batch in ids for id in of_batch).items() if count > 1}
    total = sum(map(len, ids))
    if twice:
        first = min(twice)
        where = ", ".join(str(rank) for rank, of_batch in enumerate(ids) for id in of_batch if id == first)
        verdict = f"{len(twice)} of {total} ids come more than once: id {first} at rank {where}"
    else:
        verdict = f"{total} ids, none twice"
    on = "the CPU" if device == "cpu" else f"GPU {device.partition(':')[2]}, {gpu_names()[int(device[5:])]}"
    classes = f" of {plural(len(names), 'class')}" if (names := classes_of(source)) else ""
    return Sheet(
        title=f"The first batch of {_ranks(options.workers)}, {options.pipeline} pipeline of {job.name}",
        facts=(
            f"{source}: {plural(len(source), 'sample')}{classes}",
            (
                f"world size {options.workers}, batch size {config.batch_size}, {size} pixels, seed {config.seed}, "
                f"decoded on {on}"
            ),
        ),
        rows=rows,
        verdict=verdict,
        good=not twice,
    )


def _ranks(workers: int) -> str:
    return "1 rank" if workers == 1 else f"each of {workers} ranks"


def _order(options: Preview, config: Any, samples: int) -> "Order":  # noqa: ANN401 (a job's)
    from raydali.data.stream.stream import OrderedPass, Stream

    size, workers = config.batch_size, options.workers
    # Training needs a whole batch per rank, validation one image.
    needed = size * workers if options.pipeline == "train" else size * (workers - 1) + 1
    if samples < needed:
        raise UsageError(
            f"--workers {workers} with --batch-size {size} needs {plural(needed, 'image')}, not {samples}: lower one"
        )
    if options.pipeline == "val":
        return OrderedPass(samples=samples, batch_size=size)
    return Stream(samples=samples, epochs=1, batch_size=size, global_batch_size=size * workers, seed=config.seed)


def _pictures(source: Source, batch: "Batch", name: str, most: int) -> list["Picture"]:
    """Return the first images of a batch, which has them under this name, with the names of their classes."""
    from raydali.report.contact_sheet import Picture

    images, ids = batch[name][:most], batch.ids.tolist()
    if images.dim() == 5:  # the middle frames of clips
        images = images[:, :, images.shape[2] // 2]
    labels = class_names(classes_of(source), batch.tensors.get("labels"), len(ids))
    return [
        Picture(image, label, [f"id {id}"], source.path(id))
        for image, id, label in zip(images.permute(0, 2, 3, 1).cpu().numpy(), ids, labels, strict=False)
    ]


def class_names(classes: Sequence[str], labels: "torch.Tensor | None", count: int) -> list[str]:
    """Return the name of the class of each sample, or of all its labels; empty if it has none."""
    if labels is not None and labels.dim() == 1:
        return [classes[label] for label in labels.tolist()]
    if labels is None or labels.shape[1:] != (len(classes),):
        return [""] * count
    of_samples = ([name for name, has in zip(classes, row, strict=True) if has] for row in labels.tolist())
    return [", ".join(names) or "none" for names in of_samples]
