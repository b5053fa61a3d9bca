"""The interface of the loaders, which turn micro-batches of ids into batches of device tensors. There are three.

    dali        dali_loader.py: reads, decodes and augments in C++ and on the GPU
    torch       torch_loader.py: Pillow and torchvision in worker processes over the same stream, the baseline
    synthetic   make.py: one resident batch again and again, the ceiling that no loader can pass

A loader knows no Ray: rank and world size are integers.

Images stay 8-bit up to the model, which normalises them (training/models/normalized.py): a quarter of the memory and of
the copying, and compiled it costs the step nothing.

A loader notes which samples it has in flight, in a file on the node that outlives the process. If a decoder crashes its
process, processes that start later find there which samples to try in a child process first (screening.py,
quarantine.py). Processes that were killed otherwise leave nothing to try.
"""

import faulthandler
import fcntl
import mmap
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import IO, Any, ClassVar, Self, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from raydali.data.broken.quarantine import REMEDY, KnowsBroken, Quarantine
from raydali.data.index.source import Source
from raydali.data.load.depths import STEPS_AHEAD
from raydali.data.read.reading import PYTHON, WaitTimer
from raydali.data.stream.stream import MicroBatch, Order, Stream
from raydali.data.tasks.pipeline import Pipeline, check_form
from raydali.errors import DataError, StorageAway
from raydali.text import plural

SAMPLES_TRIED = 100
LEAST_BATCHES = 2
"""An iteration with a limit of time has so many batches, if there are so many."""

MOST_NOTED = 2**16
"""The number of ids that a file holds, the last ones."""
_HEAD = 2
"""The file begins with the numbers of ids that were noted and handed out so far."""
_CRASH = ".crash"


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch as a loader yields it: named tensors on the device, and the ids of their samples.

    Images are (batch, channels, height, width) in channels-last memory, uint8. `micro_batch.replaced_by`
    has the ids of the substitutes of broken samples.
    """

    tensors: dict[str, torch.Tensor]
    micro_batch: MicroBatch

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def ids(self) -> NDArray[np.int64]:
        """The samples' ids, (batch,)."""
        return self.micro_batch.ids


class LoaderOptions(TypedDict, total=False):
    """Keyword arguments of every loader; see `Loader`."""

    rank: int
    world_size: int
    start: int
    device: torch.device | str
    threads: int
    quarantine: Callable[[Order], KnowsBroken] | None


class Loader(ABC):
    """Yields this rank's batches, from global batch `start` on.

    A new iteration starts there again, and ends the previous one.

    Args:
        source: what the ids index, as the pipeline expects it.
        pipeline: makes tensors of ids.
        order: the Stream, or an OrderedPass.
        rank, world_size: this worker's world rank, and the number of workers.
        start: global batches already consumed, `stream.steps_of(state_dict())`.
        device: where tensors go, and with `cuda` where DALI decodes.
        threads: number of threads on the host: DALI's threads, or the DataLoader's worker processes.
        quarantine: the broken samples of the order, known ones and those that are found. Default: a broken
            sample is an error.

    Attributes:
        in_flight: the note of the samples that are being loaded.
        waits: how long `next` has blocked the host, by cause, as far as this loader can measure it.
        python: time of pipelines' Python in this process, outside the training thread.
        batches_taken: by all loaders of this process; it grows as long as the process makes progress.
        on_batch: is told of each batch before it is handed out.
        limit_seconds: an iteration ends after this time, with at least two batches; None: no limit.
    """

    batches_taken: ClassVar[int] = 0

    def __init__(
        self,
        source: Source,
        pipeline: Pipeline[Any],
        order: Order,
        *,
        rank: int = 0,
        world_size: int = 1,
        start: int = 0,
        device: torch.device | str = "cpu",
        threads: int = 1,
        quarantine: Callable[[Order], KnowsBroken] | None = None,
    ) -> None:
        check_form(pipeline)
        self.source, self.pipeline, self.order = source, pipeline, order
        self.rank, self.world_size, self.start = rank, world_size, start
        self.device, self.threads = torch.device(device), max(1, threads)
        unbound: KnowsBroken = Quarantine(order.samples, strict=True) if quarantine is None else quarantine(order)
        self.quarantine = unbound.bound_to(source, pipeline)
        self.in_flight = InFlight(self.quarantine.noted_in)
        self.waits = WaitTimer()
        self.python = PYTHON
        self._consumed: MicroBatch | None = None
        self.on_batch: Callable[[Batch], object] | None = None
        self.limit_seconds: float | None = None
        self._batches: Generator[Batch, None, None] | None = None
        self._steps: deque[torch.cuda.Event] = deque()

    def __iter__(self) -> Iterator[Batch]:
        self._end_iteration()
        self._consumed = None
        self._batches = self._begin()
        return self._hand_out(self._batches)

    def _begin(self) -> Generator[Batch, None, None]:
        """Return the batches of an iteration; each micro-batch is noted as in flight once it is taken."""
        self.in_flight.clear()
        micro_batches = self.order.micro_batches(self.rank, self.world_size, start=self.start)
        return self._load(map(self._noted, micro_batches))

    def _noted(self, micro_batch: MicroBatch) -> MicroBatch:
        self.in_flight.begin(micro_batch.number, micro_batch.ids)
        return micro_batch

    def _hand_out(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        began, limit = time.monotonic(), self.limit_seconds
        for index in count():
            if limit is not None and index >= LEAST_BATCHES and time.monotonic() - began > limit:
                return
            if self.device.type == "cuda":
                self._keep_pace()
            batch = next(batches, None)
            if batch is None:
                return
            self.in_flight.end(batch.micro_batch.number)
            self._consumed = batch.micro_batch
            Loader.batches_taken += 1
            with self.waits.on("gpu decode" if self.device.type == "cuda" else "cpu decode"):
                finished = self.pipeline.finish(batch.tensors)
            batch = Batch(finished, batch.micro_batch)
            if self.on_batch is not None:
                self.on_batch(batch)
            yield batch

    def _keep_pace(self) -> None:
        """Wait for the GPU if the host is STEPS_AHEAD of it; this does not count as waiting for the loader."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._steps.append(event)
        if len(self._steps) > STEPS_AHEAD:
            self._steps.popleft().synchronize()

    def state_dict(self) -> dict[str, int]:
        """Return the stream's state after the batches that were handed out; prefetched ones do not count.

        A global batch counts as consumed once this rank has had all its micro-batches of it.

        Raises:
            TypeError: the order is no Stream; only a stream is resumed.
        """
        if not isinstance(self.order, Stream):
            raise TypeError(f"only a Stream has a state, not {type(self.order).__name__}")
        steps, last = self.start, self._consumed
        if last is not None:
            complete = last.index + self.world_size >= self.order.micro_batches_per_step
            steps = last.step + complete
        return self.order.state(steps)

    @property
    def prepared_batches(self) -> int | None:
        """The number of batches that are ready in the last queue that can be inspected; None if there is no queue.

        Cheap, and never waits.
        """
        return None

    def begin_ahead(self) -> None:  # noqa: B027 (a loader need not be able to)
        """Begin the next iteration in the background, so that its first batches lie ready. It ends the current one."""

    def wait_until_begun(self) -> None:  # noqa: B027 (nor wait for it)
        """Wait until the first batch of `begin_ahead` is there, if it was called."""

    @abstractmethod
    def _load(self, micro_batches: Iterator[MicroBatch]) -> Generator[Batch, None, None]:
        """The batches of these micro-batches, in order. Called again once the last call's generator is closed."""

    def _end_iteration(self) -> None:
        if self._batches is not None:
            self._batches.close()

    def close(self) -> None:
        """Free threads, processes and memory. The loader cannot be used afterwards; batches in use stay good."""
        self._end_iteration()
        self.in_flight.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device, images in channels-last memory."""
        layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
        return tensor.to(self.device, non_blocking=True).contiguous(memory_format=layout)

    def resident_batch(self, size: int, epoch: int = 0) -> dict[str, torch.Tensor]:
        """Return `size` samples of noise on the device, with the labels, masks and the like of the first sample.

        Args:
            size: number of samples.
            epoch: the images have the size of this epoch.

        Raises:
            DataError: none of the first samples can be read, so that their shape is unknown.
            StorageAway: the storage does not answer, for a minute.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        noise = partial(torch.randint, 256, generator=generator, dtype=torch.uint8, device=self.device)
        batch, sample = {}, partial(self.pipeline.in_epoch(epoch).sample, self.source)
        for name, one in zip(self.pipeline.outputs, self._any_sample(sample), strict=True):
            shape = size, *one.shape
            is_image = one.dtype == torch.uint8 and one.ndim > 2 and len(one) > 1  # a mask has one channel
            batch[name] = self._to_device(noise(shape) if is_image else one.expand(shape))
        return self.pipeline.finish(batch)

    def _any_sample(self, sample: Callable[[int, int], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
        unreadable = []
        for id in range(min(SAMPLES_TRIED, self.order.samples)):
            try:
                return self.quarantine.read(id, partial(sample, id, 0))
            except StorageAway:
                raise
            except Exception as error:
                unreadable.append(f"{self.source.path(id)}: {error}")
        first = f"the first {plural(len(unreadable), 'sample')}"
        raise DataError(f"{first} cannot be read, such as {unreadable[0]}; {REMEDY}")


class InFlight:
    """The samples that a loader has in flight. A batch costs microseconds: the file is mapped into memory.

    Args:
        path: the beginning of the file's path; None: nothing is noted.
    """

    def __init__(self, path: Path | None) -> None:
        self._batches = deque[tuple[int, int]]()
        self._file: IO[bytes] | None = None
        self._slots = np.zeros(_HEAD + 1, np.int64)
        if path is None:
            return
        with suppress(OSError):  # without notes, a crash costs more restarts
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _note_crashes(path.parent, os.getpid())
            self._file = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed by `close`)
                prefix=f"{path.name}.{os.getpid()}.", dir=path.parent, delete=False
            )
            fcntl.lockf(self._file, fcntl.LOCK_EX)  # forks do not hold it
            self._file.write(bytes(8 * (_HEAD + MOST_NOTED)))  # a page without room on the disk would end the process
            self._file.flush()
            self._slots = np.frombuffer(mmap.mmap(self._file.fileno(), 0), np.int64)

    def begin(self, number: int, ids: NDArray[np.int64]) -> None:
        """Note the samples (N,) of the micro-batch of this number, before they are read."""
        places = (self._slots[0] + np.arange(len(ids))) % (len(self._slots) - _HEAD)
        self._slots[_HEAD + places] = ids
        self._slots[0] += len(ids)
        self._batches.append((number, len(ids)))

    def end(self, number: int) -> None:
        """Note that this micro-batch, and all that began before it, are decoded."""
        while self._batches:
            ended, count = self._batches.popleft()
            self._slots[1] += count
            if ended == number:
                break

    def clear(self) -> None:
        """Note that nothing is in flight."""
        self._batches.clear()
        self._slots[1] = self._slots[0]

    def close(self) -> None:
        """Remove the file."""
        self._slots = np.zeros(_HEAD + 1, np.int64)
        if self._file is not None:
            Path(self._file.name).unlink(missing_ok=True)
            self._file.close()


@cache
def _note_crashes(folder: Path, process: int) -> IO[str]:
    """Have the signal that crashes this process written into a file, as well as to where Ray writes it."""
    file = (folder / f"{process}{_CRASH}").open("w")
    faulthandler.enable(file, all_threads=False)
    return file


def left_in_flight(folder: Path) -> dict[str, list[int]]:
    """Return what crashed processes had in flight, by the name of the path of `InFlight`, and drop all other notes.

    Their notes are kept for later starts: another file may crash the run before a checkpoint has this one.
    """
    in_flight = defaultdict[str, list[int]](list)
    with suppress(OSError), (folder / "lock").open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        for path in [*folder.glob("*.*.*")]:
            name, process, _ = path.name.rsplit(".", 2)
            if int(process) == os.getpid():
                continue
            with suppress(OSError), path.open("r+b") as file:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # refused while the process is alive
                if not (contents := file.read()):  # just made by another process
                    continue
                noted, ended, *slots = np.frombuffer(contents, np.int64).tolist()
                ids = [slots[place % len(slots)] for place in range(max(ended, noted - len(slots)), noted)]
                crash = folder / f"{process}{_CRASH}"
                if not (ids and crash.exists() and crash.stat().st_size):
                    path.unlink()
                    continue
                in_flight[name] += ids
    return in_flight
