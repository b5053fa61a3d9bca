"""Files by id: where they lie, what DALI takes, what is sent to the workers."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from raydali.data.index.files import Files
from raydali.data.index.labeled import LabeledFiles
from raydali.data.read import local_files
from raydali.data.read.contents import Failed
from raydali.errors import UsageError
from tests.support.messages import mentioning
from tests.support.object_stores import PutObjects
from tests.support.trees import bytes_of, grow, read_by_dali, samples


def test_relative_and_home_roots(nasty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(nasty.parent)
    monkeypatch.setenv("HOME", str(nasty.parent))
    assert LabeledFiles.scan("nasty/").root == LabeledFiles.scan("~/nasty").root == str(nasty)


def test_dali_reads_encoded_paths(nasty: Path) -> None:
    index = LabeledFiles.scan(str(nasty))
    ids = np.array([id for id in range(len(index)) if Path(index.path(id)).exists()])[::-1]
    assert read_by_dali(index.encoded_paths(ids)) == [Path(index.path(int(id))).read_bytes() for id in ids]


def test_pickle_shares_its_buffers(nasty: Path) -> None:
    index = LabeledFiles.scan(str(nasty))
    fingerprint = index.fingerprint
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(index, protocol=5, buffer_callback=buffers.append)
    copy = pickle.loads(data, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    assert np.shares_memory(copy.packed_paths, index.packed_paths)
    assert np.shares_memory(copy.labels, index.labels) and np.shares_memory(copy.offsets, index.offsets)
    assert samples(copy) == samples(index) and copy.fingerprint == fingerprint


def test_at_another_root(tmp_path: Path) -> None:
    index = LabeledFiles.scan(str(grow(tmp_path, ["a/1.jpg"])))
    moved = index.relocate("s3://bucket/train/")
    assert moved.path(0) == "s3://bucket/train/a/1.jpg" and moved.fingerprint == index.fingerprint
    assert index.relocate("/").path(0) == "/a/1.jpg"


@pytest.mark.xfail(
    strict=True,
    raises=RuntimeError,
    reason="DALI 2.4.0's fn.io.file.read asks Google for a name with a NUL at its end",
)
def test_dali_reads_gcs(gcs: dict[str, bytes]) -> None:
    gcs["a/1.jpg"] = b"content"
    assert read_by_dali(LabeledFiles.scan("gs://bucket").encoded_paths(np.array([0]))) == [b"content"]


def test_a_list_below_its_root(tmp_path: Path) -> None:
    paths = ["b/2.jpg", "1.jpg", "a b/\u00fc.jpg", "1.jpg"]
    files = Files.from_list(str(grow(tmp_path, paths)), paths)
    assert [files.path(id) for id in range(len(files))] == [f"{tmp_path}/{path}" for path in paths]
    assert files.relocate("s3://bucket/x/").path(2) == "s3://bucket/x/a b/\u00fc.jpg"
    assert Files.from_list("/", paths).path(1) == "/1.jpg"
    assert len(Files.from_list("/", [])) == 0


def test_folders_give_what_a_list_gives() -> None:
    folders = Files.from_folders(
        "/data", [("", ["2.jpg", "1.jpg"]), ("empty", []), ("a/b", ["1.jpg"]), ("a", ["1.jpg"])]
    )
    listed = Files.from_list("/data", ["2.jpg", "1.jpg", "a/b/1.jpg", "a/1.jpg"])
    assert np.array_equal(folders.packed_paths, listed.packed_paths)
    assert np.array_equal(folders.offsets, listed.offsets)
    assert folders.fingerprint == listed.fingerprint
    assert len(Files.from_folders("/data", [("", [])])) == 0


@pytest.mark.parametrize("has_root", [True, False])
def test_local_files_are_read_many_at_a_time(has_root: bool, tmp_path: Path) -> None:
    paths = ["long/name of a file.jpg", "1.jpg", "a b/\u00fc.jpg"]
    grow(tmp_path, paths)
    files = Files.from_list(str(tmp_path), paths if has_root else [str(tmp_path / path) for path in paths])
    assert (files.root != "") is has_root
    for ids in ([1], [2, 0, 1, 1, 2, 2, 0]):
        contents = files.contents(np.array(ids))
        assert bytes_of(contents) == [f"content of {paths[id]}".encode() for id in ids]
        assert (contents.tensors is not None) == (len(ids) > local_files.FEW)
    (tmp_path / paths[0]).unlink()
    *others, gone = files.contents(np.array([1, 2, 1, 2, 1, 0]))
    assert not any(isinstance(content, Failed) for content in others)
    assert isinstance(gone, Failed) and isinstance(gone.error, FileNotFoundError)


@pytest.mark.parametrize("root", ["/data", "s3://bucket/data"])
def test_a_list_with_absolute_paths_and_uris(root: str) -> None:
    files = Files.from_list(f"{root}/", ["a/1.jpg", "/b/2.jpg", "s3://other/3.jpg", "gs:/4.jpg"])
    assert [files.path(id) for id in range(4)] == [
        f"{root}/a/1.jpg",
        "/b/2.jpg",
        "s3://other/3.jpg",
        f"{root}/gs:/4.jpg",
    ]
    assert str(files) == f"the list of {root}/a/1.jpg and 3 more"
    with pytest.raises(UsageError, match=mentioning("/elsewhere paths relative")):
        files.relocate("/elsewhere")


def test_a_mixed_list_is_read(s3: PutObjects, gcs: dict[str, bytes], tmp_path: Path) -> None:
    grow(tmp_path, ["root/1.jpg", "elsewhere/2.jpg"])
    s3("mixed", {"3.jpg": b"content in S3"})
    gcs["4.jpg"] = b"content at Google's"
    paths = ["1.jpg", f"{tmp_path}/elsewhere/2.jpg", "s3://mixed/3.jpg", "gs://bucket/4.jpg"]
    contents = [b"content of root/1.jpg", b"content of elsewhere/2.jpg", b"content in S3", b"content at Google's"]
    ids = np.array([3, 1, 0, 2, 1])

    files = Files.from_list(str(tmp_path / "root"), paths)
    assert [files.read(id) for id in range(4)] == contents
    assert bytes_of(files.contents(ids)) == [contents[id] for id in ids]


def test_a_local_path_that_looks_like_a_uri_is_local(tmp_path: Path) -> None:
    files = Files.from_list(str(grow(tmp_path, ["a/gs:/1.jpg"])), ["a/gs://1.jpg"])
    assert files.path(0) == f"{tmp_path}/a/gs://1.jpg"
    assert files.read(0) == (tmp_path / "a/gs:/1.jpg").read_bytes()


@pytest.mark.parametrize(
    ("root", "path", "message"),
    [
        ("http://host", "1.jpg", "http://host"),
        ("/data", "http://host/1.jpg", "http://host/1.jpg"),
        ("/data", "a\0b", "a\\x00b"),
        ("/data", "s3://bucket/what?.jpg", "bucket/what?.jpg"),
        ("s3://bucket", "a/../1.jpg", "bucket/a/../1.jpg"),
        ("s3://bucket", "./1.jpg", "bucket/./1.jpg"),
    ],
)
def test_what_cannot_be_listed(root: str, path: str, message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        Files.from_list(root, ["fine.jpg", path])


def test_fingerprint_is_of_the_paths_as_they_were_packed() -> None:
    base = Files.from_list("/data", ["a", "b"]).fingerprint
    assert base == Files.from_list("s3://bucket/data", ["a", "b"]).fingerprint
    others = [["b", "a"], ["ab"], ["a"], ["/data/a", "b"]]
    assert len({base, *(Files.from_list("/data", paths).fingerprint for paths in others)}) == 5
