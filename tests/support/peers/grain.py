"""Grain: ArrayRecord files, read at random by threads of worker processes."""

# https://google-grain.readthedocs.io/en/latest/tutorials/dataset_advanced_tutorial.html, "Multiprocess Prefetch"
import math
import os
import pickle
from pathlib import Path
from typing import Any

from tests.support.peers import Batches, Setup, crops, deliver, images_of, picture, read

NAME = "Grain"
PACKAGE = DISTRIBUTION = "grain"
NO_S3 = "Grain's way to S3 is a mounted bucket (Mountpoint for Amazon S3)"


def prepare(folder: str, target: str, threads: int) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    images = images_of(folder)
    shard = math.ceil(len(images) / threads)
    for start in range(0, len(images), shard):
        writer = ArrayRecordWriter(f"{target}/{start:08d}.array_record", "group_size:1,uncompressed")
        for path, label in images[start : start + shard]:
            writer.write(pickle.dumps((read(path), label)))
        writer.close()


def batches(setup: Setup) -> Batches:
    import grain
    import torch
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain reads flags that a program of absl has parsed
    transform = crops(setup.image_size)

    def sample(record: bytes) -> tuple[Any, int]:
        content, label = pickle.loads(record)
        return transform(picture(content)).numpy(), label

    source = grain.sources.ArrayRecordDataSource([str(path) for path in sorted(Path(setup.images).iterdir())])
    dataset = grain.MapDataset.source(source).seed(0).shuffle().repeat().map(sample)
    threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=setup.batch_size)
    dataset = dataset.to_iter_dataset(threads).batch(setup.batch_size, drop_remainder=True)
    dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=setup.threads, per_worker_buffer_size=2))
    os.environ["OMP_NUM_THREADS"] = "1"
    return deliver(((torch.from_numpy(images), torch.from_numpy(labels)) for images, labels in dataset), setup.device)
