"""A loader for data that fit on the device: every image is decoded once, at the start, and stays there.

    source --Pillow, threads--> (N, H, W, 3) uint8 on the device
    ids --> draws, windows (threads) --> rows of it --> resize, flip --> batch

Draws, substitutes of broken images and order are those of the other loaders. Each rank holds all images.
"""

from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from raydali.data.loading.batch_reader import InputPrefetcher, InputsError
from raydali.data.loading.loader import Batch, Loader, LoaderOptions
from raydali.data.sources.labeled import LabeledSource
from raydali.data.sources.source import Source
from raydali.data.stream.stream import MicroBatch, Order
from raydali.data.tasks.pillow import apart, decoded
from raydali.data.tasks.pipeline import Inputs, Pipeline
from raydali.errors import DataError, StorageAway, UsageError

DECODED_AT_ONCE = 1024
MOST_SHARE = 0.5
"""Maximum share of a GPU's free memory for the images of a loader: the training step needs the rest."""

Integers = NDArray[np.int64]


class ResidentLoader(Loader):
    """Hands out images that are decoded once and stay on the device.

    Raises:
        UsageError: images have different sizes, or do not fit into the GPU's memory.
        DataError, StorageAway: images cannot be read, and the quarantine does not take them.
    """

    def __init__(self, source: Source, pipeline: Pipeline[Any], order: Order, **options: Unpack[LoaderOptions]) -> None:
        super().__init__(source, pipeline, order, **options)
        self._images = self._decode_all()
        height, width = self._images.shape[1:3]
        pinned = self.device.type == "cuda"
        drawn = _Draws(self.pipeline, (height, width), pinned)  # type: ignore[abstract]  # it has `inputs` only
        self._prefetcher = InputPrefetcher(self, drawn, threads=1)

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        self._prefetcher.begin(micro_batches)
        while True:
            try:
                prepared = self._prefetcher.take()
            except StopIteration:
                return
            except InputsError as failed:
                raise failed.error from failed.error.__cause__
            ids, *inputs = map(torch.as_tensor, prepared.inputs)
            images = self._images[ids.to(self.device, non_blocking=True)].permute(0, 3, 1, 2)
            pipeline = self.pipeline.in_epoch(prepared.micro_batch.counts_to)
            named = zip(pipeline.outputs, pipeline.from_decoded(images, *inputs), strict=True)
            yield Batch({name: self._to_device(tensor) for name, tensor in named}, prepared.micro_batch)

    @property
    def prepared_batches(self) -> int:
        """Batches whose random numbers are drawn."""
        return self._prefetcher.ready

    def close(self) -> None:
        """Stop the threads, and free the images."""
        super().close()
        self._prefetcher.close()
        self._images = torch.empty(0)

    def _decode_all(self) -> torch.Tensor:
        """Return the images (N, H, W, 3) on the device; broken ones are black."""
        images: torch.Tensor | None = None
        with ThreadPoolExecutor(self.threads) as threads:
            for first in range(0, len(self.source), DECODED_AT_ONCE):
                ids = range(first, min(first + DECODED_AT_ONCE, len(self.source)))
                self.in_flight.clear()
                self.in_flight.begin(first, np.array(ids))
                sound = {
                    id: image
                    for id, image in zip(ids, threads.map(self._decode, ids), strict=True)
                    if image is not None
                }
                if not sound:
                    continue
                if images is None:
                    example, shape = next((id, image.shape) for id, image in sound.items())
                    images = self._allocated(shape)
                for id, image in sound.items():
                    if image.shape != shape:
                        raise UsageError(
                            f"{self.source.path(id)} has {_size(image.shape)} pixels, and {self.source.path(example)} "
                            f"{_size(shape)}: --loader resident needs images of one size; give dali or torch"
                        )
                images[[*sound]] = torch.from_numpy(np.stack([*sound.values()])).to(self.device)
        if images is None:
            raise DataError(f"none of the images of {self.source} can be read")
        return images

    def _allocated(self, shape: tuple[int, ...]) -> torch.Tensor:
        whole = len(self.source), *shape
        if self.device.type == "cuda":
            check_memory(int(np.prod(whole)), torch.cuda.mem_get_info(self.device)[0])
        return torch.zeros(whole, dtype=torch.uint8, device=self.device)

    def _decode(self, id: int) -> NDArray[np.uint8] | None:
        """Return an image (H, W, 3); None if it is broken, which the quarantine then knows."""
        if id in self.quarantine.known:
            return None
        source: Any = self.source  # a LabeledSource
        try:
            with apart(id in self.quarantine.in_flight_at_death):
                return self.quarantine.read(id, lambda: np.asarray(decoded(source.read(id))))
        except StorageAway:
            raise
        except Exception as error:
            if not self.quarantine.examine([id], again=True):
                raise DataError(f"sample {id} cannot be read: {self.source.path(id)}: {error}") from error
            return None


def check_memory(needed: int, free: int) -> None:
    """Check that images of so many bytes fit into a GPU with so many free bytes.

    Raises:
        UsageError: they need more than MOST_SHARE of them.
    """
    if needed > MOST_SHARE * free:
        raise UsageError(
            f"--loader resident needs {needed / 1e9:.3g} GB of GPU memory for the images, more than half of the "
            f"{free / 1e9:.3g} GB that are free: give --loader dali"
        )


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]}"


@dataclass(frozen=True)
class _WithoutFiles:
    """A labelled source that gives ids in place of files."""

    labels: NDArray[Any]

    def files(self, ids: Integers) -> Integers:
        return ids


@dataclass(frozen=True)
class _Draws(Pipeline[LabeledSource]):
    """It makes the tensors that a pipeline draws on the host for images of one size (height, width), ids first."""

    pipeline: Pipeline[Any]
    size: tuple[int, int]
    pinned: bool

    def in_epoch(self, epoch: int) -> Self:
        return replace(self, pipeline=self.pipeline.in_epoch(epoch))

    def inputs(self, source: LabeledSource, ids: Integers, epochs: Integers) -> Inputs:
        _, *drawn = self.pipeline.inputs(_WithoutFiles(source.labels), ids, epochs)
        shapes = np.tile(np.array(self.size), (len(ids), 1))
        made: Any = map(torch.as_tensor, (ids, *self.pipeline.compute_crops([shapes], tuple(drawn), "cpu")))
        return tuple(tensor.pin_memory() for tensor in made) if self.pinned else tuple(made)
