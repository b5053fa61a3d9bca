"""Files that become samples, and messages that count the others, are tested here."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydali.commands.prepare import Prepare
from raydali.commands.prepare import main as prepare
from raydali.commands.verify import Verify, main
from raydali.data.index.folder_layout import train_and_val_folders
from raydali.data.index.formats import labeled_images, unlabeled_files
from raydali.data.index.image_pairs import ImagePairs
from raydali.data.index.labeled import IMAGE_EXTENSIONS, LabeledFiles
from raydali.data.index.tar import TarShards
from raydali.data.index.validation_set import Split
from raydali.data.video.clips import scan_videos
from raydali.errors import DataError, UsageError
from tests.support.broken import folder
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


def test_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = LabeledFiles.scan(str(grow(tmp_path, SAMPLES + LEFT + UNNOTICED)))
    assert {path.removeprefix(f"{tmp_path}/") for path, _ in samples(index)} == {*SAMPLES}
    assert index.classes == ("cat", "dog", "recycled")
    assert index.skipped == {"left behind by other systems": len(LEFT)}
    assert mentions(caplog.text, f"{tmp_path} {len(LEFT)} 'cat' 3")
    assert train_and_val_folders(str(tmp_path), Split()) is None


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


OF_TREE = [("a/1.jpg", 0), ("b/1.png", 1), ("c/1.jpg", 2)]
SKIPPED = ["a/2.svg", "a/3.SVG", "a/4.jp2", "b/sub/2.svg", "b/3.heic", "d/1.jxl"]
HIDDEN = ["a/.ipynb_checkpoints/1.jpg", ".ipynb_checkpoints/1.jpg", ".git/x", "c/deep/.cache/.more/1.svg"]
EXPECTED = ["a/Thumbs.db", "a/.DS_Store", "a/._1", "b/README", "b/labels.csv", "c/LICENSE.md", "c/MD5SUMS", "notes.txt"]
TREE = [*(path for path, _ in OF_TREE), *SKIPPED, *HIDDEN, *EXPECTED]
KINDS = "8 files skipped: 3 .svg, 2 in hidden folders, 1 .heic, 1 .jp2, 1 .jxl"
TOLD = f"{KINDS} ('a' 4, 'b' 2, '.ipynb_checkpoints' 1 and 1 more)"


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "skipped" in record.message]


def test_companions_in_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = LabeledFiles.scan(str(grow(tmp_path, TREE)))
    assert samples(index) == [(f"{tmp_path}/{path}", label) for path, label in OF_TREE]
    assert index.classes == ("a", "b", "c", "d")
    (warned,) = _warned(caplog)
    assert mentions(warned, f"{tmp_path} {TOLD} JPEG PNG")


def test_files_in_hidden_folders_need_no_other_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    LabeledFiles.scan(str(grow(tmp_path, ["a/1.jpg", "a/.ipynb_checkpoints/1.jpg"])))
    (warned,) = _warned(caplog)
    assert mentions(warned, "1 file a") and not mentions(warned, "JPEG")


def test_a_sound_data_set_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not LabeledFiles.scan(str(grow(tmp_path, [path for path, _ in OF_TREE] + EXPECTED))).skipped
    assert not caplog.records


def test_companions_of_objects(s3: PutObjects, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    s3("stamps", {f"data/{path}": b"" for path in TREE})
    local = LabeledFiles.scan(str(grow(tmp_path, TREE)))
    remote = LabeledFiles.scan("s3://stamps/data")
    assert samples(remote) == samples(local.relocate("s3://stamps/data")) and remote.skipped == local.skipped
    assert [TOLD in message for message in _warned(caplog)] == [True, True]


def test_none_that_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning(".jpg .webp 2 .heic")):
        LabeledFiles.scan(str(grow(tmp_path, ["a/1.HEIC", "b/1.heic"])))


def test_pairs_and_videos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = ["img/s/1.jpg", "gt/s/1.png", "img/.cache/s/2.jpg", "img/s/3.heic", "gt/s/3.heic", "gt/notes.txt"]
    assert len(ImagePairs.scan(str(grow(tmp_path / "pairs", pairs)))) == 1
    assert mentions(caplog.text, "3 2 .heic 1 img gt")
    assert len(scan_videos(str(grow(tmp_path / "videos", ["a/1.mp4", "a/2.wmv", "a/2.srt.txt"])))) == 1
    assert mentions(caplog.text, "1 .wmv a MP4")


@pytest.mark.slow
def test_verify_tells_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path, 3, {})
    grow(tmp_path, ["0/1.svg", "0/2.svg", "1/.hidden/1.jpg"])
    main(Verify(data=source.root, workers=1))
    told = "3 files skipped: 2 .svg, 1 in hidden folders"
    assert f"3 samples, none broken; {told}" in capsys.readouterr().out
    Path(source.path(1)).write_bytes(b"")
    with pytest.raises(DataError, match=mentioning(f"1 3 {told}")):
        main(Verify(data=source.root, workers=1))


def test_prepare_leaves_them_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder(tmp_path / "source", 3, {})
    grow(tmp_path / "source", ["0/1.svg", "1/.hidden/1.jpg"])
    prepare(Prepare(source=source.root, target=str(tmp_path / "target"), workers=1))
    assert mentions(caplog.text, "2 1 .svg 0")
    assert LabeledFiles.scan(str(tmp_path / "target")).fingerprint == LabeledFiles.scan(source.root).fingerprint


def test_gif_and_avif_are_samples_in_folders_and_in_shards(tmp_path: Path, pack: Pack) -> None:
    names = ["cat/1.gif", "cat/2.AVIF", "dog/3.jpg"]
    assert [*LabeledFiles.scan(str(grow(tmp_path / "folders", names))).relative_paths()] == names
    shard = TarShards.scan(str(pack("0.tar", dict.fromkeys(names, b"x"))))
    assert [shard.path(id).partition(":")[2] for id in range(3)] == names
