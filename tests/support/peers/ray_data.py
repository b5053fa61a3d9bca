"""Ray Data: tasks that read and crop, and an iterator over their blocks."""

# https://docs.ray.io/en/latest/data/working-with-images.html and working-with-pytorch.html
import logging
from typing import Any

from tests.support.peers import Batches, Setup, crops, images_of

NAME = "Ray Data"
PACKAGE = DISTRIBUTION = "ray"
AT_ONCE = 16384
"""Images of one pass, which repeats small data: each pass starts anew."""


def batches(setup: Setup) -> Batches:
    import ray
    from PIL import Image
    from ray.data import DataContext

    ray.init(address="local", num_cpus=setup.threads, include_dashboard=False, logging_level=logging.ERROR)
    DataContext.get_current().enable_progress_bars = False
    transform, images = crops(setup.image_size), images_of(setup.images)
    labels = {path.split("/")[-2]: label for path, label in images}

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        label = labels[row["path"].split("/")[-2]]
        return {"images": transform(Image.fromarray(row["image"])).numpy(), "labels": label}

    folders = [setup.images] * max(1, AT_ONCE // len(images))
    dataset = ray.data.read_images(folders, mode="RGB", include_paths=True, shuffle="files").map(sample)
    while True:
        for batch in dataset.iter_torch_batches(
            batch_size=setup.batch_size, prefetch_batches=2, drop_last=True, device=setup.device
        ):
            yield batch["images"], batch["labels"]
