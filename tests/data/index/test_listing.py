"""The listing of a tree: links, folders that cannot be read, stores that refuse."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.listing import folder_entries, list_tree
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects, serve
from tests.support.trees import grow, samples


@pytest.mark.parametrize("target", [".", "..", "../..", "../../.."])
def test_link_to_a_folder_above_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str) -> None:
    root = grow(tmp_path / "root", ["cat/a/1.jpg", "dog/2.jpg"])
    (root / "cat" / "a" / "loop").symlink_to(target)
    assert [path for path, _ in samples(LabeledFiles.scan(str(root)))] == [f"{root}/cat/a/1.jpg", f"{root}/dog/2.jpg"]
    assert mentions(caplog.text, "cat/a/loop")


def test_links_that_lead_to_each_other_end(tmp_path: Path) -> None:
    root = grow(tmp_path / "root", ["cat/1.jpg"])
    grow(tmp_path / "other", ["2.jpg"])
    (root / "cat" / "there").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(root / "cat")
    assert [path for path, _ in samples(LabeledFiles.scan(str(root)))] == [
        f"{root}/cat/1.jpg",
        f"{root}/cat/there/2.jpg",
    ]


def test_unreadable_folder_is_an_error(nasty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if path.endswith("/cat/a"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # file modes do not stop root, who runs the tests in containers
    with pytest.raises(UsageError, match=mentioning("/cat/a")):
        LabeledFiles.scan(str(nasty))


@pytest.mark.usefixtures("s3")
def test_s3_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.end_headers()

    with serve(Refusal) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(UsageError, match=mentioning("s3://few/t ACCESS_DENIED")):
            LabeledFiles.scan("s3://few/t")


TREE = {"": ["1.jpg", "notes"], "a": [], "a/b": ["2.mp4"], "c": ["3"]}


def test_all_files_and_folders(tmp_path: Path) -> None:
    grow(tmp_path, ["1.jpg", "notes", "a/b/2.mp4", "c/3"])
    (tmp_path / "empty").mkdir()
    listing = list_tree(str(tmp_path), of="files")
    assert {folder: sorted(names) for folder, names in listing.items()} == TREE | {"empty": []}


def test_all_objects(s3: PutObjects) -> None:
    s3("tree", {f"x/{key}": b"" for key in ("1.jpg", "notes", "a/b/2.mp4", "c/3", "empty/")})
    listing = list_tree("s3://tree/x", of="files")
    assert {folder: sorted(names) for folder, names in listing.items()} == TREE | {"empty": []}


@pytest.mark.parametrize("scheme", ["s3", "gs", "file"])
def test_a_folder_that_is_not_there_is_known_as_such(
    scheme: str, s3: PutObjects, gcs: dict[str, bytes], tmp_path: Path
) -> None:
    """Into such a one `raydali prepare` writes, in each store."""
    s3("bucket", {"there/1.jpg": b""})
    gcs["there/1.jpg"] = b""
    root = {"s3": "s3://bucket", "gs": "gs://bucket", "file": str(grow(tmp_path, ["there/1.jpg"]))}[scheme]
    assert [each.name for each in folder_entries(f"{root}/there")] == ["1.jpg"]
    with pytest.raises(FileNotFoundError):
        next(folder_entries(f"{root}/new"))


def test_a_missing_folder_says_what_it_is_to_hold(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("nothing class folders")):
        list_tree(f"{tmp_path}/nothing", of="class folders")


def test_a_folder_below_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "weights.pth").touch()
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/weights.pth file folder images")) as raised:
        list_tree(f"{tmp_path}/weights.pth/train/img", of="images")
    assert "/img" not in str(raised.value)
