"""Files that are no samples and could be: counted and told, once; what is common beside samples is not mentioned."""

import subprocess
import sys
from pathlib import Path

import pytest

from raydali.commands.prepare import Prepare
from raydali.commands.prepare import main as prepare
from raydali.commands.verify import Verify, main
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.labeled import LabeledFiles
from raydali.data.sources.video.clips import scan_videos
from raydali.errors import DataError, UsageError
from tests.support.broken import folder
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.trees import grow, samples

SAMPLES = [("a/1.jpg", 0), ("b/1.png", 1), ("c/1.jpg", 2)]
SKIPPED = ["a/2.svg", "a/3.SVG", "a/4.gif", "b/sub/2.svg", "b/3.heic", "d/1.jxl"]
HIDDEN = ["a/.ipynb_checkpoints/1.jpg", ".ipynb_checkpoints/1.jpg", ".git/x", "c/deep/.cache/.more/1.gif"]
EXPECTED = ["a/Thumbs.db", "a/.DS_Store", "a/._1", "b/README", "b/labels.csv", "c/LICENSE.md", "c/MD5SUMS", "notes.txt"]
TREE = [*(path for path, _ in SAMPLES), *SKIPPED, *HIDDEN, *EXPECTED]
KINDS = "8 files skipped: 3 .svg, 2 in hidden folders, 1 .gif, 1 .heic, 1 .jxl"
TOLD = f"{KINDS} ('a' 4, 'b' 2, '.ipynb_checkpoints' 1 and 1 more)"


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "skipped" in record.message]


def test_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    index = LabeledFiles.scan(str(grow(tmp_path, TREE)))
    assert samples(index) == [(f"{tmp_path}/{path}", label) for path, label in SAMPLES]
    assert index.classes == ("a", "b", "c", "d")
    (warned,) = _warned(caplog)
    assert mentions(warned, f"{tmp_path} {TOLD} JPEG PNG")


def test_files_in_hidden_folders_need_no_other_format(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    LabeledFiles.scan(str(grow(tmp_path, ["a/1.jpg", "a/.ipynb_checkpoints/1.jpg"])))
    (warned,) = _warned(caplog)
    assert mentions(warned, "1 file a") and not mentions(warned, "JPEG")


def test_a_sound_data_set_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not LabeledFiles.scan(str(grow(tmp_path, [path for path, _ in SAMPLES] + EXPECTED))).skipped
    assert not caplog.records


def test_objects(s3: PutObjects, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    s3("stamps", {f"data/{path}": b"" for path in TREE})
    local = LabeledFiles.scan(str(grow(tmp_path, TREE)))
    remote = LabeledFiles.scan("s3://stamps/data")
    assert samples(remote) == samples(local.relocate("s3://stamps/data")) and remote.skipped == local.skipped
    assert [TOLD in message for message in _warned(caplog)] == [True, True]


def test_none_that_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning(".jpg .webp 2 .heic")):
        LabeledFiles.scan(str(grow(tmp_path, ["a/1.HEIC", "b/1.heic"])))


def test_pairs_and_videos(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = ["img/s/1.jpg", "gt/s/1.png", "img/.cache/s/2.jpg", "img/s/3.avif", "gt/s/3.avif", "gt/notes.txt"]
    assert len(ImagePairs.scan(str(grow(tmp_path / "pairs", pairs)))) == 1
    assert mentions(caplog.text, "3 2 .avif 1 img gt")
    assert len(scan_videos(str(grow(tmp_path / "videos", ["a/1.mp4", "a/2.wmv", "a/2.srt.txt"])))) == 1
    assert mentions(caplog.text, "1 .wmv a MP4")


def test_verify_tells_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = folder(tmp_path, 3, {})
    grow(tmp_path, ["0/1.svg", "0/2.svg", "1/.hidden/1.jpg"])
    main(Verify(data=source.root, workers=1))
    told = "3 files skipped: 2 .svg, 1 in hidden folders"
    assert f"3 samples, none broken; {told}" in capsys.readouterr().out
    Path(source.path(1)).write_bytes(b"")
    with pytest.raises(DataError, match=mentioning(f"1 3 {told}")):
        main(Verify(data=source.root, workers=1))
    command = [str(Path(sys.executable).with_name("raydali")), "verify", source.root, "--workers", "1"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    assert mentions(said, f"warning: {source.root} {told} '0' 2 '1' 1 JPEG")


def test_prepare_leaves_them_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = folder(tmp_path / "source", 3, {})
    grow(tmp_path / "source", ["0/1.svg", "1/.hidden/1.jpg"])
    prepare(Prepare(source=source.root, target=str(tmp_path / "target"), workers=1))
    assert mentions(caplog.text, "2 1 .svg 0")
    assert LabeledFiles.scan(str(tmp_path / "target")).fingerprint == LabeledFiles.scan(source.root).fingerprint
