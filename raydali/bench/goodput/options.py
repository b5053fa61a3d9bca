"""The options of `raydali bench goodput`, and the names of its contenders."""

from dataclasses import dataclass

CHOICE = {
    "undisturbed": "raydali, no kills",
    "ray": "Ray Train, restart",
    "raydali-restart": "raydali, restart",
    "raydali-in-place": "raydali, in place",
    "torchft": "torchft",
}
"""The names that --contenders accepts, and what each is called in tables."""


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """Options of the runs."""

    contenders: str = ",".join(CHOICE)
    """Contenders to measure. torchft needs the package torchft."""
    workers: int = 3
    """Number of ranks."""
    steps: int = 1000
    """Steps of a run."""
    batch_size: int = 32
    """Images per batch and rank."""
    image_size: int = 64
    """Height and width of the images, in pixels."""
    checkpoint_every: int = 20
    """Steps between checkpoints."""
    kill_every: float = 20.0
    """Mean time between two kills, in seconds."""
    seed: int = 1
    """Seed of the times of the kills and of the ranks."""
    timeout: float = 600.0
    """Seconds from the start of a run after which it is ended, and judged by the step that it has reached."""
