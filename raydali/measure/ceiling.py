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
"""Duration of a measurement. No ceiling is measured of steps that take longer."""
VOID_ABOVE = 1.1
"""A larger share of the ceiling means that something slowed the machine down while the ceiling was measured. Shares
from 1 up to this one are measurement error, and count as 1."""
MAX_FOREIGN = 0.5
"""The share of a saturated node's CPU time that other processes may use during the measurement. Ray and the driver use
a quarter if there are few cores; if that made the ceiling too low, epochs are faster than it."""


@dataclass(frozen=True)
class Ceiling:
    """A measured ceiling, or the reason why there is none.

    Attributes:
        images_per_second: of all ranks together; None if it is not known.
        why: the reason; empty if no measurement was requested.
        void: whether it was measured on a busy machine, and must be measured again.
    """

    images_per_second: float | None = None
    why: str = ""
    void: bool = False


def share_of_ceiling(images_per_second: float | None, ceiling: float | None) -> float | None:
    """Return a rate as a share of the ceiling, at most 1; None if one is not known, or the ceiling cannot be right."""
    share = images_per_second / ceiling if images_per_second and ceiling else None
    return None if share is None or share > VOID_ABOVE else min(share, 1.0)


def disturbed(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Describe how other processes used the cores while a ceiling was measured; empty if they were free.

    Args:
        ranks: of each its "node" and, in seconds, its "cpu_seconds", "host_busy_seconds" and "host_idle_seconds"; None
            for what is not known.
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
    """Measure how fast all ranks together take steps, each its own over and over; every rank must call it.

    Args:
        take: makes a step on a resident batch, everything compiled and tuned already. The caller trains on each step
            that is yielded before it asks for the next one.
        images: consumed by one step of this rank.
        device: where the steps run.
        total: the sum over ranks of a small tensor, which no rank passes before the others reach it (`Worker.sum`).
        seconds: approximate duration; at least MIN_STEPS and at most MAX_STEPS steps are measured, for no longer than
            MAX_SECONDS after the first one if a step is shorter.

    Returns:
        Images per second of all ranks.
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

    # All ranks take the same number of steps, however fast each of them is.
    ranks, taken = added_up(1), added_up((yield from timed(1)))
    in_time = max(1.0, MAX_SECONDS * ranks / taken)
    steps = round(min(max(seconds * ranks / taken, MIN_STEPS), MAX_STEPS, in_time))
    return added_up(images * steps / (yield from timed(steps)))


def synchronize(device: "torch.device") -> None:
    """Wait until the device has finished all work; a CPU always has."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
