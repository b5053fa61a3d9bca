"""Packages that only some jobs and commands need, and the extras of raydali that install them."""

from importlib.util import find_spec

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
        raise UsageError(f"{purpose} need the module {module}, which is not installed: pip install 'raydali[{extra}]'")
