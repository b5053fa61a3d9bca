"""Tests of clusters share an environment with a home of its own, and limits of their time."""

from pathlib import Path

import pytest

from tests.support.cluster import environment
from tests.support.ray_up_files import CLOUDS


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "home"
    home.mkdir()
    return environment(home)


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray alone takes minutes to start where ten others want two cores; two at once would take even longer."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(900))
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.xdist_group("ray"))
