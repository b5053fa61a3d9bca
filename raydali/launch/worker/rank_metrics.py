"""Metrics of a rank for Prometheus, exported by Ray with the prefix `ray_`; see docs/monitoring.md.

Ray adds the suffix `_total` to counters, and exports them until its metrics agent on the node ends. It drops a gauge
20 s after it was last set, so gauges disappear after their rank has ended.
"""

import psutil
import torch
from ray.util.metrics import Counter, Gauge

from raydali.measure.records import Figures

RANK_TAGS = ("run", "rank")
IMAGES = "raydali_images"
GAUGES = {
    "raydali_images_per_second": "Training speed of this rank, without validation.",
    "raydali_of_ceiling_ratio": "Training speed as a share of the ceiling: the speed with a batch on the device.",
    "raydali_loader_wait_ratio": "Share of the training time in which this rank waited for its loader.",
    "raydali_step_seconds": "Mean duration of a step since the last report: forward, backward, optimizer.",
    "raydali_own_step_seconds": "Duration of a step without the wait for other ranks' gradients.",
    "raydali_loss": "Mean loss over the images since the last report.",
    "raydali_loader_prepared_batches": "Batches prepared ahead, in the loader's last queue whose length can be read.",
    "raydali_host_memory_bytes": "Resident memory of this rank's process.",
    "raydali_gpu_memory_bytes": "GPU memory that PyTorch holds for this rank.",
}
"""The gauges of each rank, with their help texts."""


class RankMetrics:
    """The metrics of one rank.

    Args:
        run: the run's name.
        rank: the world rank.
        device: the device whose memory is reported.
    """

    def __init__(self, run: str, rank: int, device: torch.device) -> None:
        tags = {"run": run, "rank": str(rank)}
        self._device = device
        self._images = Counter(IMAGES, "Images that this rank trained on.", RANK_TAGS).set_default_tags(tags)
        self._images._record(0.0)  # Prometheus needs a 0 to see the first increment, and `inc` refuses 0
        self._gauges = {name: Gauge(name, text, RANK_TAGS).set_default_tags(tags) for name, text in GAUGES.items()}

    def publish(self, figures: Figures) -> None:
        """Set the metrics that were measured. It takes about 60 microseconds and does not wait for the device."""
        if figures.images:
            self._images.inc(figures.images)
        on_gpu = self._device.type == "cuda"
        for name, value in {
            "raydali_images_per_second": figures.images_per_second,
            "raydali_of_ceiling_ratio": figures.of_ceiling,
            "raydali_loader_wait_ratio": figures.loader_wait_fraction,
            "raydali_step_seconds": figures.step_seconds,
            "raydali_own_step_seconds": figures.own_step_seconds,
            "raydali_loss": figures.loss,
            "raydali_loader_prepared_batches": figures.prepared_batches,
            "raydali_host_memory_bytes": psutil.Process().memory_info().rss,
            "raydali_gpu_memory_bytes": torch.cuda.memory_reserved(self._device) if on_gpu else None,
        }.items():
            self._gauges[name].set(value)  # which ignores None
