"""The segments that a rank of `raydali bench train` measures, interleaved, so that drift affects all alike.

    rehearsal                compile, tune, capture, before a loader exists
    ceiling before           the step on one resident batch of noise
    loader starts, some batches are kept
    each round:
      (the loader fills its queues, then idles)
      ceiling                the step on the resident batch, while the loader idles
      replay                 the step on kept batches, while the loader idles
      contention             the step on the resident batch; one batch per step is taken from the loader and discarded
      real                   the step on the loader's batches
      alone                  batches are taken and discarded
      (idle)
      host_contention        the step on the resident batch, while the same loader decodes on the CPU only

A segment ends when this rank's stream has finished, not the whole device: it does not wait for a loader that works
ahead. Before segments with a loader, uncounted steps consume the batches in its queues.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raydali.bench.loader.contenders import LOADERS, Task
from raydali.bench.train.feed import BatchSource, Pair

if TYPE_CHECKING:
    import torch

    from raydali.train.worker import Worker

Step = Callable[["torch.Tensor", "torch.Tensor"], None]
"""One optimizer step on images and labels."""
KEPT_BATCHES = {"cuda": 16, "cpu": 4}
AWAKE_STEPS = {"cuda": 5, "cpu": 1}
"""Number of uncounted steps after a rest, until the clock rate is high again."""
REST_SECONDS = 0.5
HOST_LOADERS = ("raydali", "native")
"""Loaders whose work on the host is measured without the GPU; torchvision works only on the host."""


@dataclass(frozen=True)
class Segment:
    """Times of a segment on one rank: its length, the device's wait for data, the host's time in `next`."""

    seconds: float
    loader_wait_seconds: float = 0.0
    host_wait_seconds: float = 0.0


def uses_plain_loop(loading: Task) -> bool:
    """Return whether training uses the usual loop: the default stream, kernels launched one by one."""
    return loading.loader == "native"


class Segments:
    """The measurement of segments on one rank. Every rank must call the same methods."""

    def __init__(
        self,
        loading: Task,
        feed: BatchSource,
        step: Step,
        worker: "Worker",
        *,
        steps: int,
        split: bool,
    ) -> None:
        self._loading, self._feed, self._step, self._worker = loading, feed, step, worker
        self._steps, self._split = steps, split
        self._kept: list[Pair] = []
        self._seconds_per_batch = 0.0
        self._has_host = split and loading.gpu and loading.loader in HOST_LOADERS
        on_host = replace(loading, gpu=False, pixels="float32" if loading.loader == "native" else "uint8")
        self._on_host = LOADERS[loading.loader].batches(on_host)

    def before(self) -> Segment:
        """Rehearse, measure the ceiling before a loader exists, then start the loader."""
        from raydali.train.step import WARM_UP_STEPS_OF_DDP

        on = self._worker.device.type
        # A CPU captures nothing, and tunes everything in the first step.
        for _ in range(WARM_UP_STEPS_OF_DDP + 1 if on == "cuda" else 1):
            self._step(*self._feed.resident)
        ceiling = self._on_device(self._resident)
        self._kept = [self._clone()]
        began = time.perf_counter()
        self._kept += [self._clone() for _ in range(KEPT_BATCHES[on] - 1)]
        self._seconds_per_batch = (time.perf_counter() - began) / (KEPT_BATCHES[on] - 1)
        if not uses_plain_loop(self._loading):  # as raydali's jobs do
            gc.collect()
            gc.freeze()
        return ceiling

    def round(self) -> dict[str, Segment]:
        """Measure each segment once."""
        segments = {}
        self._rest()
        segments["ceiling"] = self._on_device(self._resident)
        if self._split:
            segments["replay"] = self._on_device(lambda i: self._step(*self._kept[i % len(self._kept)]))
            segments["contention"] = self._with_loader(lambda _: self._step(*self._feed.resident))
        segments["real"] = self._with_loader(lambda batch: self._step(*batch))
        segments["alone"] = alone = self._with_loader(lambda _: None)
        self._seconds_per_batch = max(self._seconds_per_batch, alone.seconds / self._steps)
        if self._has_host:
            next(self._on_host)  # the first one starts it
            self._rest()
            with background_load(self._on_host) as taken:
                began = time.perf_counter()
                segments["host_contention"] = self._on_device(self._resident)
                seconds = time.perf_counter() - began
            self._seconds_per_batch = max(self._seconds_per_batch, seconds / max(1, len(taken)))
        return segments

    def close(self) -> None:
        """Stop the loader that decodes on the host."""
        self._on_host.close()

    def _resident(self, _: int) -> None:
        self._step(*self._feed.resident)

    def _clone(self) -> "Pair":
        images, labels = next(self._feed.batches)
        return images.clone(), labels.clone()

    def _rest(self) -> None:
        """Sleep until loaders have filled their queues and are idle."""
        time.sleep(max(REST_SECONDS, 2 * self._feed.store * self._seconds_per_batch))

    def _on_device(self, body: Callable[[int], None]) -> Segment:
        """Time steps on batches that are on the device; the first ones after a rest do not count."""
        for i in range(AWAKE_STEPS[self._worker.device.type]):
            body(i)
        return self._timed(body)

    def _with_loader(self, use: "Callable[[Pair], None]") -> Segment:
        """Time taking a batch and using it, once per step of a segment."""
        from raydali.measure.clock import StageClock

        for _ in range(self._feed.store + 1):
            use(next(self._feed.batches))
        clock = StageClock(self._worker.device)
        waited = 0.0

        def body(_: int) -> None:
            nonlocal waited
            clock.enter("loader_wait")
            began = time.perf_counter()
            batch = next(self._feed.batches)
            waited += time.perf_counter() - began
            clock.enter("step")
            use(batch)

        segment = self._timed(body)
        return replace(segment, loader_wait_seconds=clock.totals()["loader_wait"], host_wait_seconds=waited)

    def _timed(self, body: Callable[[int], None]) -> Segment:
        self._finish()
        self._worker.barrier()
        began = time.perf_counter()
        for i in range(self._steps):
            body(i)
        self._finish()
        return Segment(time.perf_counter() - began)

    def _finish(self) -> None:
        if self._worker.device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._worker.device).synchronize()


@contextmanager
def background_load(batches: Iterator[Any]) -> Iterator[list[None]]:
    """Run a thread that takes and discards batches as fast as they come; yields a list that grows by one per batch.

    Raises:
        Exception: the error that the batches raised, at the end of the block.
    """
    over = threading.Event()
    taken: list[None] = []
    errors: list[Exception] = []

    def take() -> None:
        try:
            while not over.is_set():
                next(batches)
                taken.append(None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=take, name="loader on the host")
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
