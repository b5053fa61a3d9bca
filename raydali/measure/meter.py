"""The meter that measures an epoch on one rank."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

import torch

from raydali.host.cpu_times import cpu_times
from raydali.host.hardware import has_bf16
from raydali.measure.clock import StageClock
from raydali.measure.records import RankRecord

if TYPE_CHECKING:
    from raydali.data.loading.loader import Loader


class EpochMeter:
    """A meter that counts images, sums the loss on the device and times stages. Only `record` waits for the device.

    The stages are "loader_wait", "step", "exchange" (the time between this rank's last gradient and the end of the
    all-reduce), "checkpoint" and "validation" (which does not count to an epoch's seconds). Time in other stages counts
    as time of the training loop itself.

    Attributes:
        on_stage: called with the name of each stage that is entered, if it is set.

    Args:
        loader: the loader whose waits and Python time are recorded, if there is one.
        peak_flops: the peak of the device, for the record.
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
    ) -> None:
        self._who = {"rank": rank, "world_size": world_size, "node": node, "device": device.type}
        self._who |= {"has_bf16": has_bf16(device), "peak_flops": peak_flops}
        self.on_stage: Callable[[str], None] | None = None
        self._loader = loader
        self._clock = StageClock(device)
        self._stage_began = time.perf_counter()
        self._first_batch_seconds: float | None = None
        self._seen_first = self._exchanging = False
        self._first_step_seconds: float | None = None
        # For the first step: seconds of the host's own work until now, and the start of the current part of this work.
        self._first_own_seconds = 0.0
        self._own_since: float | None = None
        self._images = self._steps = self.replaced = 0
        self._sampled_exchanges: list[tuple[float, float]] = []  # seconds of an exchange, and of the rest of its step
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        # Copies of the loss on the host: the one that `loss_so_far` has requested, and the last one that has arrived.
        self._loss_on_host = torch.zeros((), dtype=torch.float64, pin_memory=device.type == "cuda")
        self._loss_asked: tuple[int, torch.cuda.Event | None] | None = None
        self._loss_got = 0.0, 0
        self._begin()

    def _begin(self) -> None:
        self._note_loader()
        self._cpu_before = cpu_times()

    def _note_loader(self) -> None:
        self._waits_before, self._python_before = self._of_loader()

    def _of_loader(self) -> tuple[dict[str, float], float]:
        """Return the loader's totals: seconds for which it blocked the host, by cause, and seconds of its Python."""
        if self._loader is None:
            return {}, 0.0
        return dict[str, float](self._loader.waits.seconds.items()), self._loader.python.seconds

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
        self._clock.enter(stage)
        self._stage_began = time.perf_counter()
        if self._first_batch_seconds is not None and self._first_step_seconds is None:
            self._note_own_part(stage == "step")

    def _note_own_part(self, goes_on: bool) -> None:
        now = time.perf_counter()
        if self._own_since is not None:
            self._first_own_seconds += now - self._own_since
        self._own_since = now if goes_on else None

    def add(self, loss: torch.Tensor, images: int) -> None:
        """Count a micro-batch: its mean loss, still on the device, and its images."""
        self._loss_sum += loss.detach() * images
        self._images += images
        self.end_exchange()

    def end_exchange(self) -> None:
        """Note that the all-reduce has ended, if there was one; `add` does so, too."""
        if self._exchanging:
            self._exchanging = False
            self._mark("step")

    def exchange(self) -> None:
        """Note that this rank has all its gradients of the step, and their all-reduce begins."""
        self._exchanging = True
        self._mark("exchange")

    @property
    def steps(self) -> int:
        """The number of steps since the last reset."""
        return self._steps

    def sample_exchange(self, seconds: float) -> None:
        """Record a sampled all-reduce of a CUDA graph, which the stage clock cannot measure. Call it between steps.

        Captured steps do identical work, so the time beyond that of the fastest step is a wait in the all-reduce. It
        waits for the device.
        """
        self._clock.totals()
        step = self._clock.latest("step")
        if step is not None:
            self._sampled_exchanges.append((seconds, max(0.0, step - seconds)))

    def end_step(self) -> None:
        """Count a step. After a worker's first step also record the time of the host's own work."""
        self._steps += 1
        if self._first_batch_seconds is not None and self._first_step_seconds is None:
            self._note_own_part(False)
            self._first_step_seconds = self._first_own_seconds

    def first_batch(self) -> None:
        """Record that the worker has its first batch, for which the running stage waits; later calls do nothing."""
        if not self._seen_first:
            self._first_batch_seconds, self._seen_first = time.perf_counter() - self._stage_began, True
            self._note_loader()  # later waits are attributed to causes, those of the first batch are not

    @property
    def images(self) -> int:
        """The number of images since the last reset; a GPU may not have finished the last ones."""
        return self._images

    def so_far(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return the seconds and the number of runs of each stage since the last reset; see `StageClock.so_far`."""
        return self._clock.so_far()

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
        self._loss_on_host.copy_(self._loss_sum, non_blocking=True)
        there = torch.cuda.Event() if self._loss_sum.is_cuda else None
        if there is not None:
            there.record()
        self._loss_asked = self._images, there

    def record(self) -> RankRecord:
        """Return the record since the last reset. It waits for the device."""
        cpu, times = cpu_times(), self._clock.totals()  # in this order the device is busy meanwhile
        waits, python = self._of_loader()
        spent = cpu - self._cpu_before if cpu is not None and self._cpu_before is not None else None
        stepped = times.get("step", 0.0) + times.get("exchange", 0.0)
        exchange, shortest = times.get("exchange"), self._clock.shortest("exchange")
        if sampled := self._sampled_exchanges:
            shortest, own = min(length for length, _ in sampled), median(rest for _, rest in sampled)
            exchange = max(0.0, stepped - own * self._steps)
        return RankRecord(
            **self._who,  # type: ignore[arg-type]  # rank, world_size, node
            images=self._images,
            loss_sum=self._loss_sum.item(),
            seconds=sum(seconds for stage, seconds in times.items() if stage != "validation"),
            loader_wait_seconds=times.get("loader_wait", 0.0),
            step_seconds=stepped,
            checkpoint_seconds=times.get("checkpoint", 0.0),
            first_batch_seconds=self._first_batch_seconds,
            replaced=self.replaced,
            steps=self._steps,
            first_step_seconds=self._first_step_seconds,
            exchange_seconds=exchange,
            shortest_exchange_seconds=shortest,
            loader_waits={cause: seconds - self._waits_before.get(cause, 0.0) for cause, seconds in waits.items()},
            python_seconds=python - self._python_before,
            cpu_seconds=spent.own if spent else None,
            cpu_queued_seconds=spent.queued if spent else None,
            helpers_seconds=spent.helpers if spent else None,
            helpers_queued_seconds=spent.helpers_queued if spent else None,
            host_busy_seconds=spent.busy if spent else None,
            host_idle_seconds=spent.idle if spent else None,
        )

    def reset(self) -> None:
        """Begin a new epoch."""
        self._clock.reset()
        self._first_batch_seconds = self._first_step_seconds = None
        self._images = self._steps = self.replaced = 0
        self._sampled_exchanges.clear()
        self._loss_sum.zero_()
        self._loss_asked, self._loss_got = None, (0.0, 0)
        self._begin()
