"""Some tests have more cases than each commit must pass."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def first_quick(names: str | Sequence[str], cases: Iterable[Any], **options: Any) -> pytest.MarkDecorator:
    """Parametrize a test as pytest does; all cases but the first are slow, so that `make test-all` alone runs them."""
    first, *others = cases
    slow = [pytest.param(*([case] if isinstance(names, str) else case), marks=pytest.mark.slow) for case in others]
    return pytest.mark.parametrize(names, [first, *slow], **options)
