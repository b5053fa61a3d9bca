"""What tests of the files for `ray up` are repeated for."""

import pytest

from tests.cluster.ray_up_files import CLOUDS


@pytest.fixture(params=CLOUDS)
def cloud(request: pytest.FixtureRequest) -> str:
    return str(request.param)
