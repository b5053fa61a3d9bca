"""Lists of files, as --data takes them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.trees import grow

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a list beside a few files, `cat/1.jpg`, `cat/2.jpg` and `dog/a, b.jpg` among them."""
    grow(tmp_path, ["cat/1.jpg", "cat/2.jpg", "dog/a, b.jpg", 'dog/"c".jpg', "bare", "elsewhere/3.jpg"])

    def write(text: str | bytes, name: str = "list.csv") -> str:
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
        return str(tmp_path / name)

    return write
