"""Batches of labelled images in TFRecord files, through DALI's own reader, with `shard_id` = world rank.

    records of all files --> W shards in a row --> buffer of SHUFFLE_BUFFER --> decode, augment
    files in another order    rank r reads           what is random about         by DALI's own
    each epoch                N*r/W .. N*(r+1)/W     the order, beside files      random numbers

What the stream of ids promises, and this does not:

- Training: every rank gets as many full batches as the smallest shard has, so none waits for another in vain, and no
  sample comes twice in an epoch. What is left, `unseen` of N samples, fewer than W * batch_size, is not trained on;
  other ones each epoch. Validation: each sample once, so ranks may get unequal numbers of batches, and the last
  one may be smaller.
- Order and pixels depend on the number of ranks.
- A run goes on at the start of an epoch, on any number of ranks, and not inside one.
- There are no ids: a broken record is not named, and ends the run.
"""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import nvidia.dali as dali
import nvidia.dali.tfrecord as features
import torch
from nvidia.dali import fn
from torch.utils.dlpack import from_dlpack

from raydali.data.classification import TrainImages, ValidationImages
from raydali.data.classification_dali import decoder
from raydali.data.hashing import keyed
from raydali.data.permutation import Permutation
from raydali.data.pipeline import Device
from raydali.data.tfrecord import TFRecords
from raydali.errors import DataError, UsageError

SHUFFLE_BUFFER = 1024
"""Records that a rank holds, of which the next is drawn: DALI's default."""
PREFETCHED_BATCHES = 2


class TFRecordLoader:
    """This rank's batches, an epoch at a time: `for batch in loader.epoch(3)`.

    A batch holds images (N, 3, image_size, image_size), uint8 in channels-last memory, and labels (N,), int64, on the
    device.

    Args:
        records: the files.
        pipeline: TrainImages to train, in random order; ValidationImages to validate, in order.
        batch_size: samples of a batch.
        rank, world_size: this worker's world rank, not its rank on its node, and the number of workers.
        device: where tensors go, and with `cuda` where DALI decodes.
        threads: of the host.
        image, label: names of the features: an encoded image, and an integer.
        first_label: what the first class is called; 1 in ImageNet as TensorFlow's models have it.

    Attributes:
        batches: of this rank in each epoch; in training all ranks have as many.
        unseen: samples that no rank is given in an epoch.

    Raises:
        UsageError: a batch size below 1, no such rank, fewer records than ranks; to train, fewer than a batch for each.
    """

    def __init__(
        self,
        records: TFRecords,
        pipeline: TrainImages | ValidationImages,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
        threads: int = 1,
        image: str = "image/encoded",
        label: str = "image/class/label",
        first_label: int = 0,
    ) -> None:
        if batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, not {batch_size}")
        if not 0 <= rank < world_size:
            raise UsageError(f"rank must lie in 0..{world_size - 1}, not {rank}")
        self.records, self.pipeline, self.batch_size = records, pipeline, batch_size
        self.rank, self.world_size = rank, world_size
        self.device, self.threads = torch.device(device), max(1, threads)
        self._image, self._label, self._first_label = image, label, first_label
        samples = len(records)
        if samples < world_size:
            raise UsageError(f"{samples} records are fewer than the {world_size} workers: lower --workers")
        self._shard = samples * (rank + 1) // world_size - samples * rank // world_size
        self.batches, self.unseen = -(-self._shard // batch_size), 0
        if isinstance(pipeline, TrainImages):
            self.batches = samples // world_size // batch_size
            self.unseen = samples - self.batches * batch_size * world_size
            if not self.batches:
                raise UsageError(
                    f"{samples} records are fewer than a batch of {batch_size} for each of {world_size} workers: "
                    f"lower --batch-size or --workers"
                )
        self._done = 0, 0

    def epoch(self, epoch: int) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of an epoch, from its start; the same again for the same seed, epoch and ranks.

        Raises:
            DataError: a record that cannot be decoded, or has no label.
        """
        self._done = epoch, 0
        pipeline = self._built(epoch)
        try:
            for batch in range(self.batches):
                size = min(self.batch_size, self._shard - batch * self.batch_size)
                images, labels = self._run(pipeline)
                self._done = (epoch, batch + 1) if batch + 1 < self.batches else (epoch + 1, 0)
                # DALI fills the last batch up from the shard's start: that is cut off here.
                yield {"images": images[:size], "labels": labels[:size]}
        finally:
            del pipeline
            gc.collect()  # DALI's graph is a ring of objects

    def state_dict(self) -> dict[str, Any]:
        """Where the batches that were handed out end."""
        epoch, batches = self._done
        return {
            "epoch": epoch,
            "batches": batches,
            "world_size": self.world_size,
            "seed": self._seed,
            "fingerprint": self.records.fingerprint,
        }

    def epoch_of(self, state: dict[str, Any]) -> int:
        """The epoch to go on with, from a state of any number of ranks.

        Raises:
            UsageError: the state lies inside an epoch, or is of another seed or other files.
        """
        for name, now in (("seed", self._seed), ("fingerprint", self.records.fingerprint)):
            if state[name] != now:
                raise UsageError(f"the checkpoint's {name} is {state[name]}, this run's is {now}: give the earlier one")
        if state["batches"]:
            others = f", and its shards were those of {state['world_size']} workers, not {self.world_size}"
            raise UsageError(
                f"the checkpoint lies {state['batches']} batches inside epoch {state['epoch']}, where DALI's TFRecord "
                f"reader cannot begin{others if state['world_size'] != self.world_size else ''}: "
                f"go on from one at an epoch's end"
            )
        return int(state["epoch"])

    @property
    def _seed(self) -> int:
        return self.pipeline.seed if isinstance(self.pipeline, TrainImages) else 0

    def _built(self, epoch: int) -> dali.Pipeline:
        # A pipeline an epoch: one that went on would mix the samples left over into the next epoch.
        trains = isinstance(self.pipeline, TrainImages)
        files = len(self.records.paths)
        order = Permutation(files, self._seed, epoch)(np.arange(files)) if trains else np.arange(files)
        pipeline = dali.Pipeline(
            batch_size=self.batch_size,
            num_threads=self.threads,
            device_id=(self.device.index or 0) if self.device.type == "cuda" else None,
            prefetch_queue_depth=PREFETCHED_BATCHES,
            seed=int(keyed(self._seed, epoch, self.rank)) >> 33,
        )
        with pipeline:
            read: Any = fn.readers.tfrecord(
                path=[self.records.paths[file] for file in order],
                index_path=[self.records.index_paths[file] for file in order],
                features={
                    self._image: features.FixedLenFeature([], features.string, ""),
                    self._label: features.FixedLenFeature([1], features.int64, -1),
                },
                shard_id=self.rank,
                num_shards=self.world_size,
                stick_to_shard=True,
                random_shuffle=trains,
                initial_fill=SHUFFLE_BUFFER,
            )
            pipeline.set_outputs(_graph(self.pipeline, read[self._image], self.device.type), read[self._label])
        pipeline.build()
        return pipeline

    def _run(self, pipeline: dali.Pipeline) -> tuple[torch.Tensor, torch.Tensor]:
        on_gpu = self.device.type == "cuda"
        try:
            images, labels = pipeline.run(torch.cuda.current_stream(self.device) if on_gpu else None)
        except RuntimeError as error:
            raise DataError(f"a record of rank {self.rank} cannot be read: {error}") from error
        numbers = from_dlpack(labels.as_tensor()) - self._first_label
        # Of a record without it DALI makes a number of no dimension, which need not be the default.
        if numbers.dim() != 2 or int(numbers.min()) < 0:
            raise DataError(f"a record of rank {self.rank} has no {self._label!r} of at least {self._first_label}")
        return from_dlpack(images.as_tensor()).movedim(3, 1), numbers[:, 0].to(self.device, non_blocking=True)


def _graph(settings: TrainImages | ValidationImages, encoded: Any, on: str) -> Any:
    device: Device = "gpu" if on == "cuda" else "cpu"
    side = settings.image_size
    if isinstance(settings, ValidationImages):
        images = fn.decoders.image(encoded, **decoder(settings, device))
        images = fn.resize(images, resize_shorter=settings.resize_size)
        return fn.crop(images, crop=(side, side))
    images = fn.decoders.image_random_crop(
        encoded,
        random_area=list(settings.random_area),
        random_aspect_ratio=list(settings.random_aspect),
        **decoder(settings, device),
    )
    images = fn.resize(images, size=(side, side))
    return fn.flip(images, horizontal=fn.random.coin_flip(probability=settings.flip_probability))
