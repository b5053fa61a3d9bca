"""The baseline loader: torch's DataLoader with Pillow and torchvision, over the same stream and random numbers."""

import gc
from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import torch
import torchvision.transforms.v2  # noqa: F401 (takes seconds: here once, instead of in each worker process)
from torch.utils.data import DataLoader, Dataset

from raydali.data.loader import Batch, Loader
from raydali.data.pipeline import Pipeline, Source
from raydali.data.stream import MicroBatch
from raydali.errors import DataError

Key = tuple[int, int]


class TorchLoader(Loader):
    """Decodes and augments in `threads` worker processes; ids, crops and flips are the DALI loader's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._plan = _Plan()
        self._loader = DataLoader(
            _Samples(self.source, self.pipeline),
            batch_sampler=self._plan,
            num_workers=self.threads,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
            # Another method would have each worker import torch anew.
            multiprocessing_context="fork",
        )

    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        self._plan.start(micro_batches)
        # A worker is a fork: were it to collect a DALI pipeline of this process, it would wait for threads it lacks.
        gc.collect()
        gc.freeze()
        try:
            loaded = iter(self._loader)
        finally:
            gc.unfreeze()
        while True:
            try:
                tensors = next(loaded)
            except StopIteration:
                return
            except DataError as error:  # the DataLoader puts the worker's traceback before it
                raise DataError(str(error).strip().splitlines()[-1].partition(": ")[2]) from error
            named = zip(self.pipeline.outputs, tensors, strict=True)
            yield Batch({name: self._to_device(tensor) for name, tensor in named}, self._plan.under_way.popleft())

    @property
    def prepared_batches(self) -> int:
        """Those that the worker processes have loaded; what came out of turn is left out."""
        loaded: Any = self._loader._iterator
        return 0 if loaded is None else int(loaded._data_queue.qsize())

    def close(self) -> None:
        """End the worker processes."""
        super().close()
        # Dropping the DataLoader would not do: an error's traceback may hold its iterator for long.
        workers: Any = self._loader._iterator
        if workers is not None:
            workers._shutdown_workers()


class _Samples(Dataset[tuple[torch.Tensor, ...]]):
    def __init__(self, source: Source, pipeline: Pipeline[Any]) -> None:
        self.source, self.pipeline = source, pipeline

    def __getitem__(self, key: Key) -> tuple[torch.Tensor, ...]:
        try:
            return self.pipeline.sample(self.source, *key)
        except Exception as error:
            raise DataError(f"sample {key[0]} cannot be read: {self.source.path(key[0])}: {error}") from error


class _Plan:
    """The DataLoader's batch sampler: (id, epoch) keys of each micro-batch, remembered until it comes back."""

    def __init__(self) -> None:
        self.start(iter(()))

    def start(self, micro_batches: Iterator[MicroBatch]) -> None:
        self.micro_batches, self.under_way = micro_batches, deque[MicroBatch]()

    def __iter__(self) -> Iterator[list[Key]]:
        for micro_batch in self.micro_batches:
            self.under_way.append(micro_batch)
            yield list(zip(micro_batch.ids.tolist(), micro_batch.epochs.tolist(), strict=True))
