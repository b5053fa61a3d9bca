"""A ceiling that a node keeps: the same command does not measure it again within a day.

NODE_CACHE/ceilings/HASH.json    images a second, when they were measured, and the operations of an image, which take
                                 time to count; HASH is of all that a ceiling depends on
"""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

MAX_AGE = 24 * 3600.0
"""Seconds after which a ceiling is measured again: drivers, clocks and neighbours of a machine change."""


class Kept(NamedTuple):
    """A node keeps these values for the next command under the same conditions.

    Attributes:
        images_per_second: the ceiling of all ranks together.
        time: when it was measured, in seconds since 1970.
        flops_per_image: see `measure.flops`; None if it was not counted.
    """

    images_per_second: float
    time: float
    flops_per_image: float | None


@dataclass(frozen=True)
class KeptCeiling:
    """The file of a ceiling on this node. One that cannot be read or written is not kept, which is no error."""

    file: Path

    @classmethod
    def of(cls, node_cache: Path, conditions: Mapping[str, object]) -> Self:
        """Return the file of a ceiling under these conditions, which JSON can represent.

        Args:
            node_cache: this node's folder for what can be made again.
            conditions: all that the ceiling depends on, including its hosts; only their hash is stored.
        """
        text = json.dumps(conditions, sort_keys=True).encode()
        return cls(node_cache / "ceilings" / f"{hashlib.sha256(text).hexdigest()[:32]}.json")

    def read(self) -> Kept | None:
        """Return what is kept; None if there is nothing, or it is too old."""
        try:
            found = json.loads(self.file.read_bytes())
            flops = found["flops_per_image"]
            kept = Kept(float(found["images_per_second"]), float(found["time"]), flops and float(flops))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return kept if kept.images_per_second > 0 and 0 <= time.time() - kept.time <= MAX_AGE else None

    def write(self, images_per_second: float, flops_per_image: float | None) -> None:
        """Keep a ceiling that was just measured, and the operations of an image if they were counted."""
        partial = self.file.with_suffix(".partial")
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(Kept(images_per_second, time.time(), flops_per_image)._asdict()))
            partial.replace(self.file)

    def forget(self) -> None:
        """Remove a ceiling that cannot be right."""
        with suppress(OSError):
            self.file.unlink()
