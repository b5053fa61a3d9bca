"""A ceiling that a node keeps: the same command does not measure it again within a day.

NODE_CACHE/ceilings/HASH.json    images a second, and when they were measured; HASH is of all that a ceiling depends on
"""

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

MAX_AGE = 24 * 3600.0
"""Seconds after which a ceiling is measured again: drivers, clocks and neighbours of a machine change."""


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

    def read(self) -> tuple[float, float] | None:
        """Return images a second of all ranks, and when they were measured, in seconds since 1970; None if too old."""
        try:
            kept = json.loads(self.file.read_bytes())
            rate, at = float(kept["images_per_second"]), float(kept["time"])
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return (rate, at) if rate > 0 and 0 <= time.time() - at <= MAX_AGE else None

    def write(self, images_per_second: float) -> None:
        """Keep a ceiling that was just measured."""
        partial = self.file.with_suffix(".partial")
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps({"images_per_second": images_per_second, "time": time.time()}))
            partial.replace(self.file)

    def forget(self) -> None:
        """Remove a ceiling that cannot be right."""
        with suppress(OSError):
            self.file.unlink()
