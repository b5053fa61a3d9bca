"""What benchmarks that train are tested with."""

import pytest


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's threads wait for each other by spinning, which on a busy machine takes longest of all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
