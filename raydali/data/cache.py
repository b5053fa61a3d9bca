"""Where raydali keeps what it can make again: indexes, built-in data."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/raydali`, or `~/.cache/raydali`; it need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "raydali"
