"""The ceiling: the speed of the training step with its batch already on the device."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from raydali.measure.costs import contended_node

if TYPE_CHECKING:
    import torch

Step = TypeVar("Step")

MAX_STEPS, MIN_STEPS = 60, 3
MAX_SECONDS = 10.0
"""Maximum duration of a measurement. If one step takes longer, no ceiling is measured."""
VOID_ABOVE = 1.1
"""A larger share of the ceiling means that something slowed the machine down while the ceiling was measured. Shares
between 1 and this limit are a measurement error, and count as 1."""
MAX_FOREIGN = 0.5
"""Maximum share of a saturated node's CPU time that other processes may use during the measurement. Ray and the driver
use a quarter if there are few cores. If that makes the ceiling too low, an epoch will be faster than the ceiling."""


@dataclass(frozen=True)
class Ceiling:
    """A measured ceiling, or the reason why there is none.

    Attributes:
        images_per_second: rate of all ranks together; None if it is not known.
        why: why it is not known or void; empty if no measurement was requested.
        void: whether it was measured on a busy machine, and must be measured again.
        gpu_busy: share of these steps in which GPUs compute, 0..1, mean over ranks; None if it was not measured.
    """

    images_per_second: float | None = None
    why: str = ""
    void: bool = False
    gpu_busy: float | None = None


def share_of_ceiling(images_per_second: float | None, ceiling: float | None) -> float | None:
    """Return a rate as a share of the ceiling, at most 1; None if one is not known or the ceiling cannot be right."""
    share = images_per_second / ceiling if images_per_second and ceiling else None
    return None if share is None or share > VOID_ABOVE else min(share, 1.0)


def disturbed(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Describe how other processes used the cores while a ceiling was measured; empty if the cores were free.

    Args:
        ranks: for each rank "node", "cpu_seconds", "host_busy_seconds" and "host_idle_seconds"; None for a time that
            is not known.
    """
    node, share = contended_node(ranks)
    where = f" on node {node}" if len({rank["node"] for rank in ranks}) > 1 else ""
    return f"other processes used {share:.0%} of the CPU time{where}" if share > MAX_FOREIGN else ""


def ceiling_images_per_second(
    take: Callable[[], Step],
    images: int,
    device: "torch.device",
    total: Callable[["torch.Tensor"], "torch.Tensor"],
    *,
    seconds: float = 1.5,
) -> Generator[Step, None, float]:
    """Measure the speed of training steps that repeat a resident batch. Every rank must call it.

    It yields the steps, and the caller trains on each of them.

    Args:
        take: makes a step on a resident batch, after everything has been compiled and tuned.
        images: number of images in one step of this rank.
        device: the device of the steps.
        total: sums a small tensor over ranks; it is also a barrier (`Worker.sum`).
        seconds: approximate duration. At least MIN_STEPS and at most MAX_STEPS steps are measured, for at most
            MAX_SECONDS after the first one.

    Returns:
        Images per second of all ranks together.
    """
    import torch

    def timed(steps: int) -> Generator[Step, None, float]:
        synchronize(device)
        began = time.perf_counter()
        for _ in range(steps):
            yield take()
        synchronize(device)
        return time.perf_counter() - began

    def added_up(value: float) -> float:
        return total(torch.tensor(value, dtype=torch.float64)).item()

    # All ranks take the same number of steps, which depends on their mean speed.
    ranks, taken = added_up(1), added_up((yield from timed(1)))
    in_time = max(1.0, MAX_SECONDS * ranks / taken)
    steps = round(min(max(seconds * ranks / taken, MIN_STEPS), MAX_STEPS, in_time))
    return added_up(images * steps / (yield from timed(steps)))


def synchronize(device: "torch.device") -> None:
    """Wait until the device has finished all work; do nothing on a CPU."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
