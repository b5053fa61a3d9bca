"""Tar shards made on the spot, and what is read of them; a cache of indexes of their own."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydali.data.index.tar import TarShards
from tests.support.pictures import encoded, photograph

Members = dict[str, bytes]
Pack = Callable[..., Path]


@pytest.fixture
def tar_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/raydali/tar-2"


def packed(members: Members, format: int = tarfile.USTAR_FORMAT, **of_members: Any) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=format) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for field, value in of_members.items():
                setattr(info, field, value)
            archive.addfile(info, io.BytesIO(content))
    return data.getvalue()


@pytest.fixture
def pack(tmp_path: Path) -> Pack:
    def write(name: str, members: Members, **options: Any) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(packed(members, **options))
        return path

    return write


def samples(shards: TarShards) -> list[tuple[str, str, bytes]]:
    """Shard and member, class, content."""
    return [
        (Path(path).name, shards.classes[label], shards.read(id))
        for id, label in enumerate(shards.labels.tolist())
        for path in [shards.path(id).replace("/", "|").replace(f"{shards.root}/".replace("/", "|"), "")]
    ]


def photographs(count: int) -> list[bytes]:
    return [encoded(photograph(("china", "flower")[i % 2], (60 + i, 90 - i))) for i in range(count)]
