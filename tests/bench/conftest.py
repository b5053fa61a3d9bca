"""What benchmarks that train are tested with."""

from collections.abc import Iterator

import pytest

from raydali.bench import processes, synthetic
from tests.support.ranks import context


@pytest.fixture(autouse=True, scope="module")
def made_here() -> Iterator[None]:
    """Make the few images and videos of a test in its process: to start others takes longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synthetic, "usable_cores", lambda: 1)
        yield


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's threads wait for each other by spinning, which on a busy machine takes longest of all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that need not import torch and DALI, which takes each of them ten times as long as what it measures."""
    monkeypatch.setattr(processes, "CONTEXT", context)
