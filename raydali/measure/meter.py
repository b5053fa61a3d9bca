"""The meter of a rank: the clock of its stages, its record of an epoch, and its live figures."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from raydali.data.read.read_counts import COUNTS, Counts
from raydali.host.cpu_times import cpu_times
from raydali.host.hardware import has_bf16
from raydali.measure.memory import memory_of
from raydali.measure.records import Figures, RankRecord, share_of_ceiling

if TYPE_CHECKING:
    from raydali.data.load.loader import Loader

PULSE_SECONDS = 5.0
"""Interval of publishing. Ray exports metrics every 10 s, and drops metrics that were not set for 20 s."""
SHORTEST_SECONDS = 1.0
"""A shorter remainder of an epoch gives no reliable speed; it is ignored if the epoch has other figures."""


class StageClock:
    """A clock that assigns every second to exactly one stage. To enter a stage ends the previous one.

    On a GPU it records CUDA events on the current stream. Durations are therefore times on the device, nothing is
    synchronised while a stage runs, and "loader_wait" is the time for which the device, not the host, waited for data.
    On a CPU it uses the host's monotonic clock.

    Attributes:
        shortest, latest: seconds of the shortest and of the last run of each stage that has ended; `totals` and
            `so_far` include new runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: deque[tuple[str, Any]] = deque()  # with a CUDA event, or the time on a CPU
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._ended: defaultdict[str, int] = defaultdict(int)
        self.shortest: dict[str, float] = {}
        self.latest: dict[str, float] = {}

    def enter(self, stage: str) -> None:
        """End the running stage and begin this one."""
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((stage, event))
        else:
            self._marks.append((stage, time.perf_counter()))
        self._add_up(wait=False)

    def totals(self) -> dict[str, float]:
        """Return the seconds of each stage until now, including the running one. It waits for the device."""
        if self._marks:
            self.enter(self._marks[-1][0])
            self._add_up(wait=True)
        return dict(self._totals)

    def so_far(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds and the number of runs of each stage that the device has finished. It never waits."""
        self._add_up(wait=False)
        return dict(self._totals), dict(self._ended)

    def reset(self) -> None:
        """Start again from zero; the running stage continues from now."""
        self.totals()
        for figures in (self._totals, self._ended, self.shortest, self.latest):
            figures.clear()

    def _add_up(self, *, wait: bool) -> None:
        while len(self._marks) > 1:
            (stage, begin), (_, end) = self._marks[0], self._marks[1]
            if self._on_gpu:
                if wait:
                    end.synchronize()
                elif not end.query():
                    return
                seconds = begin.elapsed_time(end) / 1000
            else:
                seconds = end - begin
            self._totals[stage] += seconds
            self._ended[stage] += 1
            self.latest[stage] = seconds
            self.shortest[stage] = min(seconds, self.shortest.get(stage, seconds))
            self._marks.popleft()


class EpochMeter:
    """A meter that counts images, sums the loss on the device and times stages. Only `record` waits for the device.

    The stages are "loader_wait", "step", "exchange" (the time between this rank's last gradient and the end of the
    all-reduce), "checkpoint" and "validation" (which does not count to an epoch's seconds). Time in other stages counts
    as time of the training loop itself.

    Attributes:
        clock: the clock of the stages.
        images, steps: their numbers since the last reset; a GPU may not have finished the last ones.
        replaced: number of broken samples that were replaced.
        left_out: number of images in steps that were taken back.
        loss_sum: the loss, added up over images, on the device.
        on_stage: called with the name of each stage that is entered, if it is set.

    Args:
        loader: the loader whose waits and Python time are recorded, if there is one; also an attribute.
        peak_flops: the peak of the device, for the record.
        group: the id of the worker group, for the record.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        rank: int,
        world_size: int,
        node: str,
        loader: "Loader | None" = None,
        peak_flops: float | None = None,
        group: str = "",
    ) -> None:
        self._who: dict[str, Any] = {"rank": rank, "world_size": world_size, "node": node, "device": device.type}
        self._who |= {"has_bf16": has_bf16(device), "peak_flops": peak_flops, "group": group}
        self.on_stage: Callable[[str], None] | None = None
        self.loader = loader
        self.clock = StageClock(device)
        self._stage_began = time.perf_counter()
        self._seen_first = self._exchanging = False
        # For the first step: seconds of the host's own work until now, and the start of the current part of this work.
        self._first_own_seconds = 0.0
        self._own_since: float | None = None
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        # Copies of the loss on the host: the one that `loss_so_far` has requested, and the last one that has arrived.
        self._loss_on_host = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self._begin()

    def _begin(self) -> None:
        self._first_batch_seconds: float | None = None
        self._first_step_seconds: float | None = None
        self.images = self.steps = self.replaced = self.left_out = 0
        self._sampled_exchanges: list[tuple[float, float]] = []  # seconds of an exchange, and of the rest of its step
        self._loss_asked: tuple[int, torch.cuda.Event | None] | None = None
        self._loss_got = 0.0, 0
        self._waits_before, self._python_before = self._of_loader()
        self._cpu_before = cpu_times()
        self._read = Counts()  # what `record` has recorded of the bucket's reads

    def _of_loader(self) -> tuple[dict[str, float], float]:
        """Return the loader's totals: seconds for which it blocked the host, by cause, and seconds of its Python."""
        if self.loader is None:
            return {}, 0.0
        return dict[str, float](self.loader.waits.seconds.items()), self.loader.python.seconds

    def enter(self, stage: str) -> None:
        """End the running stage and begin this one."""
        self._mark(stage)
        if self.on_stage is not None:
            self.on_stage(stage)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the inside of this context as a stage, and what follows as the training loop itself."""
        self.enter(name)
        yield
        self.enter("loop")

    def _mark(self, stage: str) -> None:
        self.clock.enter(stage)
        self._stage_began = time.perf_counter()
        if self._first_batch_seconds is not None and self._first_step_seconds is None:
            self._note_own_part(stage == "step")

    def _note_own_part(self, goes_on: bool) -> None:
        now = time.perf_counter()
        if self._own_since is not None:
            self._first_own_seconds += now - self._own_since
        self._own_since = now if goes_on else None

    def add(self, loss: torch.Tensor, images: int) -> None:
        """Count a micro-batch: its mean loss, still on the device, and its images. An all-reduce ends here."""
        self.loss_sum += loss.detach() * images
        self.images += images
        if self._exchanging:
            self._exchanging = False
            self._mark("step")

    def exchange(self) -> None:
        """Note that this rank has all its gradients of the step, and their all-reduce begins."""
        self._exchanging = True
        self._mark("exchange")

    def sample_exchange(self, seconds: float) -> None:
        """Record a sampled all-reduce of a CUDA graph, which the stage clock cannot measure. Call it between steps.

        Captured steps do identical work, so the time beyond the fastest step's time is a wait in the all-reduce. It
        waits for the device.
        """
        self.clock.totals()
        step = self.clock.latest.get("step")
        if step is not None:
            self._sampled_exchanges.append((seconds, max(0.0, step - seconds)))

    def end_step(self) -> None:
        """Count a step. After a worker's first step also record the time of the host's own work."""
        self.steps += 1
        if self._first_batch_seconds is not None and self._first_step_seconds is None:
            self._note_own_part(False)
            self._first_step_seconds = self._first_own_seconds

    def first_batch(self) -> None:
        """Record that the worker has its first batch, for which the running stage waits; later calls do nothing."""
        if not self._seen_first:
            self._first_batch_seconds, self._seen_first = time.perf_counter() - self._stage_began, True
            # Later waits are attributed to causes, waits for the first batch are not.
            self._waits_before, self._python_before = self._of_loader()

    def loss_so_far(self) -> tuple[float, int]:
        """Return the loss, summed over images, and the number of these images. It never waits.

        On a GPU, each call requests a copy and returns the newest copy that has arrived. On a CPU the values are
        current.
        """
        if self._loss_asked is None:
            self._ask_for_loss()
        images, there = self._loss_asked or (0, None)
        if there is None or there.query():
            self._loss_got, self._loss_asked = (self._loss_on_host.item(), images), None
            if there is not None:
                self._ask_for_loss()
        return self._loss_got

    def _ask_for_loss(self) -> None:
        self._loss_on_host.copy_(self.loss_sum, non_blocking=True)
        there = torch.cuda.Event() if self.loss_sum.is_cuda else None
        if there is not None:
            there.record()
        self._loss_asked = self.images, there

    def record(self) -> RankRecord:
        """Return the record since the last reset. It waits for the device."""
        cpu, times = cpu_times(), self.clock.totals()  # in this order the device is busy meanwhile
        waits, python = self._of_loader()
        self._read = COUNTS.so_far()
        of_host: dict[str, Any] = {}
        if cpu is not None and self._cpu_before is not None:
            spent = cpu - self._cpu_before
            of_host = {
                "cpu_seconds": spent.own,
                "cpu_queued_seconds": spent.queued,
                "helpers_seconds": spent.helpers,
                "helpers_queued_seconds": spent.helpers_queued,
                "host_busy_seconds": spent.busy,
                "host_idle_seconds": spent.idle,
            }
        stepped = times.get("step", 0.0) + times.get("exchange", 0.0)
        exchange, shortest = times.get("exchange"), self.clock.shortest.get("exchange")
        if sampled := self._sampled_exchanges:
            shortest, own = min(length for length, _ in sampled), median(rest for _, rest in sampled)
            exchange = max(0.0, stepped - own * self.steps)
        return RankRecord(
            **self._who,
            **of_host,
            images=self.images,
            loss_sum=self.loss_sum.item(),
            seconds=_without_validation(times),
            loader_wait_seconds=times.get("loader_wait", 0.0),
            step_seconds=stepped,
            checkpoint_seconds=times.get("checkpoint", 0.0),
            first_batch_seconds=self._first_batch_seconds,
            replaced=self.replaced,
            left_out=self.left_out,
            storage=asdict(self._read) if self._read != Counts() else {},
            memory=memory_of(self.loss_sum.device),
            steps=self.steps,
            first_step_seconds=self._first_step_seconds,
            exchange_seconds=exchange,
            shortest_exchange_seconds=shortest,
            loader_waits={cause: seconds - self._waits_before.get(cause, 0.0) for cause, seconds in waits.items()},
            python_seconds=python - self._python_before,
        )

    def reset(self) -> None:
        """Begin a new epoch."""
        COUNTS.take_away(self._read)
        self.clock.reset()
        self.loss_sum.zero_()
        self._begin()


class LiveMetrics:
    """The live figures of a rank, published at intervals.

    On a GPU they include the steps that the device has finished; the host is slightly ahead.

    Args:
        meter: the meter of the current epoch.
        batch_size: number of images in a micro-batch.
        micro_batches: number of micro-batches of this rank in each step.
        publish: called with the figures.

    Attributes:
        ceiling_images_per_second: this rank's part of the ceiling; None if it was not measured.
    """

    ceiling_images_per_second: float | None = None

    def __init__(
        self, meter: EpochMeter, *, batch_size: int, micro_batches: int, publish: Callable[[Figures], None]
    ) -> None:
        self._meter, self._batch_size, self._micro_batches, self._publish = meter, batch_size, micro_batches, publish
        self._begin()

    def step(self) -> None:
        """Publish if the interval has passed; cheap enough to call after every step."""
        if time.monotonic() - self._taken >= PULSE_SECONDS:
            self._publish(self._figures())

    def end_epoch(self) -> None:
        """Publish the rest of the epoch; call it before the meter is reset."""
        self._publish(self._figures())
        self._begin()

    def _begin(self) -> None:
        self._taken = time.monotonic()
        self._images = 0
        self._before = [0.0] * 5  # seconds, of waits, of steps, of exchanges in steps, and the number of micro-batches
        self._loss = 0.0, 0

    def _figures(self) -> Figures:
        images, self._images = self._meter.images - self._images, self._meter.images
        times, ended = self._meter.clock.so_far()
        exchanged = times.get("exchange", 0.0)
        now = [
            _without_validation(times),
            times.get("loader_wait", 0.0),
            times.get("step", 0.0) + exchanged,
            exchanged,
            ended.get("step", 0) - ended.get("exchange", 0),  # an exchange splits a step in two
        ]
        seconds, waited, stepped, exchanged, batches = (a - b for a, b in zip(now, self._before, strict=True))
        self._taken, loader = time.monotonic(), self._meter.loader
        prepared = loader.prepared_batches if loader is not None else None
        if not batches or seconds <= 0 or (self._before[-1] and seconds < SHORTEST_SECONDS):
            return Figures(images=images, prepared_batches=prepared)
        self._before = now
        rate, steps = batches * self._batch_size / seconds, batches / self._micro_batches
        return Figures(
            images=images,
            images_per_second=rate,
            of_ceiling=share_of_ceiling(rate, self.ceiling_images_per_second),
            loader_wait_fraction=waited / seconds,
            step_seconds=stepped / steps,
            own_step_seconds=(stepped - exchanged) / steps if exchanged else None,
            loss=self._mean_loss(),
            prepared_batches=prepared,
        )

    def _mean_loss(self) -> float | None:
        """Return the mean loss since the previous call."""
        (total, images), (total_before, images_before) = self._meter.loss_so_far(), self._loss
        if images == images_before:
            return None
        self._loss = total, images
        return (total - total_before) / (images - images_before)


def _without_validation(times: dict[str, float]) -> float:
    return sum(seconds for stage, seconds in times.items() if stage != "validation")
