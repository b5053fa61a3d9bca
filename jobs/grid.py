"""An example of a pipeline with a Python function, which returns an image, its four quarters and a label.

    python jobs/grid.py --data train.csv --workers 3

This command only reads an epoch, one simulated rank after another. For training, replace TrainImages by `Grid` in a
copy of jobs/imagenet.py.

The function runs on the CPU, on numpy arrays. If it needs torch tensors, convert inside it, with
`torch.from_numpy(image)` and `.numpy()`. If it needs random numbers, return
`uniforms(2, seed, samples.keys, samples.ids)` of raydali/data/stream/counter_rng.py from `inputs` too, and DALI passes
them to the function. They depend on seed, epoch and id, not on the rank.
"""

from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torchvision.transforms.v2.functional import resize

from raydali import (
    Inputs,
    LabeledFiles,
    Pipeline,
    Samples,
    Stream,
    labeled_images,
    make_loader,
    plural,
    run_main,
    timed,
)

if TYPE_CHECKING:
    from nvidia.dali.data_node import DataNode


def quarters(image: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the top left, top right, bottom left and bottom right quarter of an image (H, W, 3)."""
    y, x = image.shape[0] // 2, image.shape[1] // 2
    return image[:y, :x], image[:y, x:], image[y:, :x], image[y:, x:]


class Grid(Pipeline[LabeledFiles]):
    """A pipeline that makes five images (N, 3, 112, 112) and a label (N,) of each file."""

    image_files = 1
    outputs = "whole", "left_top", "right_top", "left_bottom", "right_bottom", "labels"

    def files(self, source: LabeledFiles) -> tuple[LabeledFiles]:
        """Return what the loader reads: the images."""
        return (source,)

    def inputs(self, source: LabeledFiles, samples: Samples) -> Inputs:
        """Return the labels, which pass through the graph."""
        return (source.labels[samples.ids],)

    def graph(self, source: LabeledFiles, *inputs: "DataNode", device: str) -> tuple["DataNode", ...]:
        """Decode and cut images on the CPU, and resize them on the device. The loader converts HWC to CHW."""
        from nvidia.dali import fn

        image, labels = fn.decoders.image(inputs[0]), inputs[1]
        cut: Any = fn.python_function(image, function=timed(quarters), num_outputs=4, output_layouts="HWC")
        *parts, labels = (node.gpu() if device == "gpu" else node for node in (image, *cut, labels))
        return *(fn.resize(part, size=(112, 112)) for part in parts), labels

    def sample(self, source: LabeledFiles, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        """Return the same outputs without DALI, for the torch loader and to find broken files."""
        image = np.array(ImageOps.exif_transpose(Image.open(BytesIO(source.read(id)))).convert("RGB"))
        parts = [torch.from_numpy(part).permute(2, 0, 1) for part in (image, *quarters(image))]
        return *(resize(part, [112, 112]) for part in parts), torch.tensor(source.labels[id])


def main(data: str, workers: int = 2, batch_size: int = 8, device: str = "cpu") -> None:
    """Read one epoch of images, one rank after another.

    Args:
        data: Folder of class folders, or a list with a line path,label per image.
        workers: Number of ranks.
        batch_size: Images per rank in each batch.
        device: Where the images are resized: cpu, or cuda:0.
    """
    source, size = labeled_images(data), batch_size * workers
    stream = Stream(samples=len(source), epochs=1, batch_size=batch_size, global_batch_size=size, seed=0)
    ids: list[int] = []
    for rank in range(workers):
        with make_loader("dali", source, Grid(), stream, rank=rank, world_size=workers, device=device) as loader:
            for batch in loader:
                ids += batch.ids.tolist()
        print(f"rank {rank}:", *(f"{name} {tuple(tensor.shape)}" for name, tensor in batch.tensors.items()))
    repeated = len(ids) - len(set(ids))
    print(f"read {len(ids)} of {plural(len(source), 'image')}, {repeated} repeated, in global batches of {size}")


if __name__ == "__main__":
    run_main(lambda: tyro.cli(main))
