"""What one rank measures of an epoch, until its line falls."""

import time

import torch

from raydali.measure.clock import StageClock
from raydali.measure.records import RankRecord


class EpochMeter:
    """Counts images, adds up the loss on the device, and keeps the time; nothing waits for the device but `record`.

    Stages: "loader_wait", "step", "checkpoint" and "validation" (which is left out of an epoch's seconds); what a
    caller enters under another name counts as the loop's own.
    """

    def __init__(self, device: torch.device, *, rank: int, world_size: int, node: str) -> None:
        self._who = {"rank": rank, "world_size": world_size, "node": node}
        self._clock = StageClock(device)
        self._created = time.perf_counter()
        self._first_batch_seconds: float | None = None
        self._seen_first = False
        self._images = 0
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)

    def enter(self, stage: str) -> None:
        """End the running stage and begin this one."""
        self._clock.enter(stage)

    def add(self, loss: torch.Tensor, images: int) -> None:
        """Count a micro-batch: its mean loss, still on the device, and its images."""
        self._loss_sum += loss.detach() * images
        self._images += images

    def first_batch(self) -> None:
        """Note that the worker's first batch is there; later calls change nothing."""
        if not self._seen_first:
            self._first_batch_seconds, self._seen_first = time.perf_counter() - self._created, True

    @property
    def images(self) -> int:
        """Counted since the last reset; a GPU may still be at the last of them."""
        return self._images

    def so_far(self) -> tuple[dict[str, float], dict[str, int]]:
        """Seconds of each stage since the last reset, and how often it was; see `StageClock.so_far`."""
        return self._clock.so_far()

    def record(self) -> RankRecord:
        """What was measured since the last reset; waits for the device."""
        times = self._clock.totals()
        return RankRecord(
            **self._who,  # type: ignore[arg-type]  # rank, world_size, node
            images=self._images,
            loss_sum=self._loss_sum.item(),
            seconds=sum(seconds for stage, seconds in times.items() if stage != "validation"),
            loader_wait_seconds=times.get("loader_wait", 0.0),
            step_seconds=times.get("step", 0.0),
            checkpoint_seconds=times.get("checkpoint", 0.0),
            first_batch_seconds=self._first_batch_seconds,
        )

    def reset(self) -> None:
        """Begin a new epoch."""
        self._clock.reset()
        self._first_batch_seconds, self._images = None, 0
        self._loss_sum.zero_()
