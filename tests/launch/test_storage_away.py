"""A storage that does not answer for a while: what workers do meanwhile, and what they say when it lasts."""

import pytest

from raydali.errors import DataError, DivergedError, StorageAway, StorageError, UsageError
from raydali.launch.ray_session import _described


@pytest.mark.parametrize(
    ("error", "final", "storage"),
    [
        (StorageAway("away"), False, True),
        (StorageError("full"), True, False),
        (DataError("broken"), True, False),
        (DivergedError("nan"), True, False),
        (UsageError("asked"), True, False),
        (RuntimeError("bug"), False, False),
    ],
)
def test_the_driver_is_told_whether_the_storage_is_away(error: Exception, final: bool, storage: bool) -> None:
    try:
        raise error
    except Exception as raised:
        described = _described(raised)
    assert str(error) in described["error"]
    assert (described["final"], described["storage"]) == (final, storage)
    assert described["usage"] is isinstance(error, UsageError)
