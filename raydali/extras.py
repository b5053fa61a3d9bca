"""Packages that only some jobs and commands need, and the extras of raydali that install them."""

import re
from importlib.metadata import requires
from importlib.util import find_spec
from typing import Literal

from raydali.errors import UsageError


def require_extra(extra: str, module: str, purpose: str) -> None:
    """Check that a module of an optional package is installed, without importing it.

    Args:
        extra: the extra in pyproject.toml that installs it.
        module: the name that it is imported by.
        purpose: what needs it, in the plural; begins the message.

    Raises:
        UsageError: it is not installed; the message says how to install it.
    """
    if find_spec(module) is None:
        # Not raydali[extra], since raydali is in no registry from which pip could install it.
        required = [line for line in requires("raydali") or [] if re.search(rf"extra == .{extra}\b", line)]
        names = " ".join(re.split(r"[^\w.-]", line)[0] for line in required)
        raise UsageError(f"{purpose} need the module {module}, which is not installed: pip install {names}")


def has_dali() -> bool:
    """Return whether NVIDIA DALI is installed, without importing it; there is none for macOS."""
    spec = find_spec("nvidia") and find_spec("nvidia.dali")
    return spec is not None and spec.origin is not None  # without an origin, an empty folder was left behind


def default_loader() -> Literal["dali", "torch"]:
    """Return the fastest loader that is installed."""
    return "dali" if has_dali() else "torch"


def require_dali(purpose: str, instead: str = "") -> None:
    """Check that NVIDIA DALI is installed.

    Args:
        purpose: what needs it; begins the message.
        instead: what else the user can do.

    Raises:
        UsageError: it is not installed.
    """
    if not has_dali():
        remedy = f"on Linux, pip install nvidia-dali-cuda120{instead and f', or {instead}'}"
        raise UsageError(f"{purpose} needs NVIDIA DALI, which is not installed: {remedy}")
