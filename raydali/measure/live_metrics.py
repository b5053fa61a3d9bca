"""Metrics of a rank's training since the last report, measured without waiting for the device."""

import time
from collections.abc import Callable

from raydali.measure.ceiling import share_of_ceiling
from raydali.measure.meter import EpochMeter
from raydali.measure.records import Figures

PULSE_SECONDS = 5.0
"""Interval of publishing. Ray exports metrics every 10 s, and drops metrics that were not set for 20 s."""
SHORTEST_SECONDS = 1.0
"""A shorter remainder of an epoch gives no reliable speed; it is ignored if the epoch has other figures."""


class LiveMetrics:
    """The live metrics of a rank, published at intervals.

    On a GPU they include the steps that the device has finished; the host is slightly ahead.

    Args:
        meter: the meter of the current epoch.
        batch_size: number of images in a micro-batch.
        micro_batches: number of micro-batches of this rank in each step.
        ceiling_images_per_second: this rank's part of the ceiling; None if it was not measured.
        prepared: returns the loader's `prepared_batches`.
        publish: called with the figures.
    """

    def __init__(
        self,
        meter: EpochMeter,
        *,
        batch_size: int,
        micro_batches: int,
        ceiling_images_per_second: float | None,
        prepared: Callable[[], int | None],
        publish: Callable[[Figures], None],
    ) -> None:
        self._meter, self._batch_size, self._micro_batches = meter, batch_size, micro_batches
        self.ceiling_images_per_second = ceiling_images_per_second
        self._prepared, self._publish = prepared, publish
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
        self._images = self._ended = 0
        self._seconds = self._waited = self._stepped = self._exchanged = 0.0
        self._loss = 0.0, 0

    def _figures(self) -> Figures:
        images, self._images = self._meter.images - self._images, self._meter.images
        seconds_of, ended_of = self._meter.so_far()
        sums = (
            sum(seconds for stage, seconds in seconds_of.items() if stage != "validation"),
            seconds_of.get("loader_wait", 0.0),
            seconds_of.get("step", 0.0) + seconds_of.get("exchange", 0.0),
            seconds_of.get("exchange", 0.0),
        )
        ended = ended_of.get("step", 0) - ended_of.get("exchange", 0)  # an exchange splits a step in two
        seconds, waited, stepped = sums[0] - self._seconds, sums[1] - self._waited, sums[2] - self._stepped
        exchanged, batches = sums[3] - self._exchanged, ended - self._ended
        self._taken, prepared = time.monotonic(), self._prepared()
        if not batches or seconds <= 0 or (self._ended and seconds < SHORTEST_SECONDS):
            return Figures(images=images, prepared_batches=prepared)
        (self._seconds, self._waited, self._stepped, self._exchanged), self._ended = sums, ended
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
