"""What other systems leave behind is no sample and no class, but in runs that began when it was."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydali.data.sources.file_rules import FIRST, following
from raydali.data.sources.folder_layout import train_and_val_folders
from raydali.data.sources.formats import labeled_images, unlabeled_files
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.labeled import IMAGE_EXTENSIONS, LabeledFiles
from raydali.data.sources.tar import TarShards
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.tars import Pack, packed
from tests.support.trees import grow, samples

SAMPLES = ["cat/1.jpg", "cat/.kept.jpg", "dog/deep/1.jpg", "recycled/1.jpg"]
LEFT = [
    "__MACOSX/cat/._1.jpg",
    "__MACOSX/1.jpg",
    "cat/._1.jpg",
    "cat/.trashed-1700000000-2.jpg",
    "cat/@eaDir/1.jpg/SYNOPHOTO_THUMB_M.jpg",
    "dog/deep/#recycle/2.jpg",
    "$RECYCLE.BIN/S-1-5-21/$R1.jpg",
    "$Recycle.Bin/1.jpg",
    "System Volume Information/1.jpg",
    "lost+found/#12.jpg",
]
UNNOTICED = ["cat/Thumbs.db", "cat/desktop.ini", "cat/Icon\r", "cat/1.jpg:Zone.Identifier", "dog/.DS_Store"]
OF_EARLIER_VERSION = "1f32ce9783f0677c347cb297666d4780", "2439890ae956101a27056e31145941c9"
"""Fingerprints of these class folders, and of a tar with these files, by 358e123."""


def test_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = LabeledFiles.scan(str(grow(tmp_path, SAMPLES + LEFT + UNNOTICED)))
    assert {path.removeprefix(f"{tmp_path}/") for path, _ in samples(index)} == {*SAMPLES}
    assert index.classes == ("cat", "dog", "recycled")
    assert index.skipped == {"left behind by other systems": len(LEFT)}
    assert mentions(caplog.text, f"{tmp_path} {len(LEFT)} 'cat' 3")
    assert train_and_val_folders(str(tmp_path), None) is None
    with following(FIRST):
        assert LabeledFiles.scan(str(tmp_path)).fingerprint == OF_EARLIER_VERSION[0]
    assert LabeledFiles.scan(str(tmp_path)).fingerprint == index.fingerprint


def test_objects(s3: PutObjects) -> None:
    s3("left", {f"data/{path}": b"" for path in SAMPLES + LEFT if "#" not in path})
    assert len(LabeledFiles.scan("s3://left/data")) == len(SAMPLES)


@pytest.mark.usefixtures("tar_cache")
def test_tar(pack: Pack, caplog: pytest.LogCaptureFixture) -> None:
    data = str(pack("0.tar", {path: path.encode() for path in SAMPLES + LEFT}))
    for _ in range(2):  # of which the other is cached
        shards = TarShards.scan(data)
        assert shards.classes == ("cat", "dog", "recycled") and len(shards) == 3
        assert mentions(caplog.text, f"{data} 7")
        with following(FIRST):
            assert TarShards.scan(data).fingerprint == OF_EARLIER_VERSION[1]


def test_pairs_and_unlabeled_files(tmp_path: Path) -> None:
    pairs = ["img/1.jpg", "img/._1.jpg", "img/@eaDir/1.jpg/2.jpg", "gt/1.png", "gt/__MACOSX/2.jpg"]
    assert len(ImagePairs.scan(str(grow(tmp_path, pairs)))) == 1
    assert len(unlabeled_files(str(tmp_path), None, IMAGE_EXTENSIONS)) == 2


@pytest.mark.usefixtures("tar_cache")
def test_archives_in_a_folder(tmp_path: Path) -> None:
    grow(tmp_path, [".git/config", "._0.tar", "lost+found/1.jpg", "@eaDir/0.tar/1.jpg"])
    (tmp_path / "0.tar").write_bytes(packed({"cat/1.jpg": b"1"}))
    assert len(labeled_images(str(tmp_path))) == 1


@pytest.fixture
def of_anyone() -> Iterator[Path]:
    """A folder that any user can reach, which tmp_path is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_the_folder_of_a_drive_that_only_root_may_read(of_anyone: Path) -> None:
    grow(of_anyone, ["cat/1.jpg", "lost+found/1.jpg", "dog/1.jpg"])
    (of_anyone / "lost+found").chmod(0o700)
    os.seteuid(65534)
    try:
        assert LabeledFiles.scan(str(of_anyone)).classes == ("cat", "dog")
        os.seteuid(0)
        (of_anyone / "dog").chmod(0o700)
        os.seteuid(65534)
        with pytest.raises(UsageError, match=mentioning(f"{of_anyone}/dog")):
            LabeledFiles.scan(str(of_anyone))
    finally:
        os.seteuid(0)
