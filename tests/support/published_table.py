"""A published table of loaders, measured again: images resized to 640x640 on the CPU and on 1, 2 and 4 GPUs.

    python -m tests.support.published_table --gpus 1,2,4

The options are those of `raydali bench loader`. The published figures are the seconds of one pass over 21,453 images of
PASCAL VOC, with batches of 32, 8 threads or 8 DataLoader workers, PyTorch 1.10 and DALI 1.6 on a Xeon Gold 5120 with
Tesla V100s. Ours are of other images. Both sides do the same work: they decode the whole image and resize it, and
deliver 8 bits, not normalized. The ratios compare hardware: a GPU with processes on a CPU. An A100 or newer decodes
JPEGs in a hardware engine, which a V100 lacks.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from raydali.bench import common, synthetic
from raydali.bench.loader import LoaderBench, our_batches
from raydali.bench.loader_rates import Batches, Task, loader_columns, loader_title, measure_loaders, row_name
from raydali.data.index.labeled import LabeledFiles
from raydali.data.tasks.pipeline import Device, Inputs, Pipeline, Samples
from raydali.data.tasks.settings import DecoderSettings
from raydali.errors import CommandError, UsageError
from raydali.output import parse_options

IMAGES = 21453
SECONDS = {0: 101.06, 1: 6.24, 2: 3.07, 4: 1.57}
"""Published seconds by number of GPUs; 0 is PyTorch on the CPU."""
SETTINGS: dict[str, Any] = {"image_size": 640, "batch_size": 32, "threads": 8, "workers": 8, "pixels": "uint8"}


@dataclass(frozen=True, kw_only=True)
class ResizedImages(Pipeline[LabeledFiles]):
    """A pipeline of resized images in 8 bits; aspect ratios are not kept."""

    image_files = 1
    image_size: int

    @property
    def outputs(self) -> tuple[str, ...]:
        return "images", "labels"

    def files(self, source: LabeledFiles) -> Sequence[LabeledFiles]:
        return (source,)

    def inputs(self, source: LabeledFiles, samples: Samples) -> Inputs:
        return (source.labels[samples.ids],)

    def graph(self, source: LabeledFiles, *inputs: Any, device: Device) -> tuple[Any, ...]:
        from nvidia.dali import fn

        contents, labels = inputs
        images = fn.decoders.image(contents, **DecoderSettings(largest_image=(0, 0)).decoder_options(device))
        images = fn.resize(images, size=(self.image_size, self.image_size))
        return images, labels.gpu() if device == "gpu" else labels

    def sample(self, source: LabeledFiles, id: int, epoch: int) -> tuple[Any, ...]:
        raise NotImplementedError  # of the loader torch, which is not measured


class ResizeTask(Task):
    def batches(self) -> Batches:
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        if self.loader == "raydali":
            return our_batches(self, "dali", ResizedImages(image_size=self.image_size))
        resize = v2.Compose([v2.Resize([self.image_size] * 2, antialias=True), v2.PILToTensor()])
        return self.data_loader(ImageFolder(self.root, resize))


def main(options: LoaderBench) -> dict[str, Any]:
    """Measure, and show the table: each row with its ratio to the first one, which is PyTorch on the CPU."""
    options = replace(options, **SETTINGS)
    common.check(options)
    rows: list[dict[str, Any]] = [{"loader": "torchvision", "pixels": "uint8", "gpus": 0, "error": None}]
    rows += [{**rows[0], "loader": "raydali", "gpus": gpus} for gpus in common.gpu_counts(options.gpus)]
    with synthetic.folder_or(options.data, partial(synthetic.write_images, count=options.make)) as root:

        def task(row: dict[str, Any]) -> ResizeTask:
            return common.task_of(ResizeTask, options, loader=row["loader"], root=root)

        measure_loaders(rows, task, options, ())
    for row in rows:
        rate, published = row["images_per_second"], SECONDS.get(row["gpus"])
        row["to_torchvision"] = common.ratio(rate, rows[0]["images_per_second"])
        row["pass_seconds"] = IMAGES / rate if rate else None
        row["published_seconds"] = published
        row["published_to_torchvision"] = common.ratio(SECONDS[0], published)
        row["published_scaling"] = common.ratio(SECONDS[1], published) if row["gpus"] else None
    columns = loader_columns("images", ["torchvision"]) | {
        "seconds": common.cell("pass_seconds", ",.2f"),
        "published": common.cell("published_seconds", ",.2f"),
        "published / torchvision": common.cell("published_to_torchvision", ".2f"),
        "published scaling": common.cell("published_scaling", ".2f"),
    }
    result = common.result_of("published table", asdict(options), rows)
    common.present(result, options, loader_title(f"seconds of {IMAGES:,} images", asdict(options)), columns)
    common.require_measured(rows, row_name)
    return result


if __name__ == "__main__":
    try:
        main(parse_options(LoaderBench, sys.argv[1:], "python -m tests.support.published_table"))
    except (UsageError, CommandError) as error:
        sys.exit(f"error: {error}")
