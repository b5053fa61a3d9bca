"""The ceiling: how fast the training step is when its batch lies on the device already."""

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
"""The share of a ceiling from which on something must have slowed the machine down when it was measured."""
MAX_FOREIGN = 0.5
"""The share of what a host without idle cores computes that other processes may have while it is measured. Ray and the
driver have a quarter where cores are few; what they take from a ceiling shows in epochs that are faster than it."""


@dataclass(frozen=True)
class Ceiling:
    """A measured ceiling, or why there is none.

    Attributes:
        images_per_second: of all ranks together; None where it is not known.
        why: it is not known, in words; empty where nobody asked.
        void: it was measured, but of a machine that did other things too: to be measured again.
    """

    images_per_second: float | None = None
    why: str = ""
    void: bool = False


def share_of_ceiling(images_per_second: float | None, ceiling: float | None) -> float | None:
    """A rate's share of a ceiling; None where one of them is not known, or the ceiling cannot be true."""
    share = images_per_second / ceiling if images_per_second and ceiling else None
    return share if share is None or share <= VOID_ABOVE else None


def disturbed(ranks: Sequence[Mapping[str, Any]]) -> str:
    """Describe which node's cores were contended while a ceiling was measured; empty for none.

    Args:
        ranks: of each its "node" and, in seconds, its "cpu_seconds", "host_busy_seconds" and "host_idle_seconds"; None
            for what is not known.
    """
    node, share = contended_node(ranks)
    return f"other processes used {share:.0%} of node {node}'s CPU time" if share > MAX_FOREIGN else ""


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
    """Wait until the device has done all that was asked of it; a CPU has."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
