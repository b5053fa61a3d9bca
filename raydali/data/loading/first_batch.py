"""The first batch of an iteration, loaded in the background before somebody asks for it."""

import threading
from collections.abc import Generator
from contextlib import suppress

import torch

from raydali.data.loading.loader import Batch


class FirstBatch:
    """A thread that takes the first one of these batches, on a stream of its own.

    Attributes:
        batches: the others, once `wait` has returned the first one.
    """

    def __init__(self, batches: Generator[Batch, None, None], device: torch.device) -> None:
        self.batches, self._device = batches, device
        self._batch: Batch | None = None
        self._thread = threading.Thread(target=self._take, daemon=True, name="first batch")
        self._thread.start()

    def _take(self) -> None:
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        with suppress(Exception), torch.cuda.stream(stream):
            batch = next(self.batches)
            # The loader reuses memory in the order of this stream, but the batch will be used on another one.
            tensors = {name: tensor.clone() for name, tensor in batch.tensors.items()}
            if stream is not None:
                stream.synchronize()
            self._batch = Batch(tensors, batch.micro_batch)

    def wait(self) -> Batch | None:
        """Return the batch, for the current stream; None if there is none or after an error."""
        self._thread.join()
        if self._batch is not None and self._device.type == "cuda":
            for tensor in self._batch.tensors.values():
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return self._batch
