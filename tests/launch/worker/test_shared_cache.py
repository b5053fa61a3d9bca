"""--cache as the ranks of a run use it, where its folder cannot be used."""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs.imagenet import Data, train
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.formats import labeled_images
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.data.read.read_counts import COUNTS
from raydali.launch.worker.shared_cache import shared_cache
from raydali.run.folder import RunFolder
from raydali.run.messages import RankWarning
from tests.support.chaos.virtual_hosts import tmpfs_unavailable
from tests.support.digits import SHORT
from tests.support.messages import mentions
from tests.support.object_stores import PutObjects
from tests.support.ranks import LocalSession, folder_of, run_ranks
from tests.support.tars import packed
from tests.support.traces import assert_whole
from tests.support.trees import bytes_of

CONFIG = replace(SHORT, data="s3://digits", epochs=1, global_batch_size=32)


@pytest.fixture(
    params=["a file", *(pytest.param(each, marks=pytest.mark.slow) for each in ("a file above it", "a read-only disk"))]
)
def unusable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder that cannot be made or written."""
    place = tmp_path / "kept"
    if request.param == "a read-only disk":
        if why_not := tmpfs_unavailable():
            pytest.skip(why_not)
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(place)], check=True)
        yield str(place)
        subprocess.run(["umount", "-l", str(place)], check=True)
    else:
        place.write_text("of somebody else")
        yield str(place / "below" if request.param == "a file above it" else place)


def trained(option: str, data: Data, folder: RunFolder, s3: dict[str, str]) -> list[str]:
    """Train through the cache; return the warnings of this rank, whose process may have been started before S3."""
    os.environ.update(s3)
    session = LocalSession(folder)
    with shared_cache(option, session.worker, "127.0.0.1", (data.train, data.val), session.warn):
        train(CONFIG, data, session)
    session.checkpoints.finish()
    return [message.text for message in session.messages if isinstance(message, RankWarning)]


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_is_named_once_and_the_run_trains(
    unusable: str, tmp_path: Path, s3: PutObjects
) -> None:
    root = Path(digits_folder())
    files = [file for split, number in (("train", 64), ("val", 16)) for file in few(root / split, number)]
    s3("digits", {str(file.relative_to(root)): file.read_bytes() for file in files})
    data = Data(*(LabeledFiles.scan(f"s3://digits/{split}") for split in ("train", "val")))
    folder, keys = folder_of(tmp_path), {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    warnings = [text for texts in run_ranks(2, trained, f"{unusable}:1G", data, folder, keys) for text in texts]
    (warning,) = [text for text in warnings if "--cache" in text]
    assert mentions(warning, f"{unusable} cannot be used on node local written bucket")
    assert_whole(folder, CONFIG.stream(64))


KEYS = [f"{label}/{number}.jpg" for label in ("cat", "dog") for number in range(10)]
FIRST = {key: key.encode().ljust(100) for key in KEYS}


@pytest.mark.parametrize(
    ("kind", "size"),
    [("folder", 250), *(pytest.param(kind, 100, marks=pytest.mark.slow) for kind in ("folder", "list", "tar"))],
)
def test_objects_that_were_replaced_are_read_again(
    kind: str, size: int, tmp_path: Path, s3: PutObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder these alone, by the ETags in its index, of a list all, and nothing while nothing changes."""
    session, bucket = LocalSession(folder_of(tmp_path)), f"replaced-{kind}-{size}"
    (tmp_path / "list.csv").write_text("".join(f"s3://{bucket}/data/{key},{key[:3]}\n" for key in KEYS))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "indexes"))

    now: dict[str, bytes] = {}

    def index() -> LabeledSource:
        data = {"folder": f"s3://{bucket}/data", "list": f"{tmp_path}/list.csv", "tar": f"s3://{bucket}/data/*.tar"}
        return labeled_images(data[kind])

    def read(contents: dict[str, bytes]) -> int:
        """Put objects, and return how many requests a start needs that reads all; they are what the bucket has."""
        now.update(contents)
        if kind != "tar":
            s3(bucket, {f"data/{key}": content for key, content in contents.items()})
        elif contents:
            s3(bucket, {"data/1.tar": packed(now)})
        source = index()
        COUNTS.take()
        with shared_cache(f"{tmp_path}/cache:1G", session.worker, "127.0.0.1", (source, source), session.warn):
            assert bytes_of(source.contents(np.arange(len(KEYS)))) == [now[key] for key in KEYS]
        return COUNTS.take().requests

    assert read(FIRST) == len(KEYS) and read({}) == 0
    if kind == "tar":  # the time of its last change has seconds
        time.sleep(1.1 - time.time() % 1)
    assert read({"cat/3.jpg": b"new".ljust(size)}) == (1 if kind == "folder" else len(KEYS))
    assert read({}) == 0
    warnings = [message.text for message in session.messages if isinstance(message, RankWarning)]
    assert len(warnings) == (kind == "list") and all(mentions(text, bucket) for text in warnings)


def few(folder: Path, number: int) -> list[Path]:
    files = sorted(folder.glob("*/*"))
    return files[:: len(files) // number][:number]
