"""The index of class folders: torchvision's to the letter, on disks and in object stores, fast and cheap to send."""

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torchvision
from numpy.typing import NDArray
from nvidia.dali import Pipeline, fn, types

from raydali.data.image_folder import ImageFolder, check_classes
from raydali.errors import UsageError
from tests.data.object_stores import PutObjects, serve

NASTY = [
    "cat/1.jpg",
    "cat/10.jpg",
    "cat/2.jpg",
    "cat/.hidden.jpg",
    "cat/.jpg",
    "cat/upper.JPEG",
    "cat/Mixed.JpG",
    "cat/notes.txt",
    "cat/no_extension",
    "cat/jpg",
    "cat/a-b/1.png",
    "cat/a/b/1.png",
    "cat/a/z.webp",
    "cat/a b/with space.bmp",
    "cat/a.jpg/inside.tif",
    "cat/\u00fcml\u00e4ut/\u65e5\u672c.ppm",
    "cat/\U0001f408.pgm",
    "cat/back\\slash%20.tiff",
    "cat-dog/1.jpg",
    "cat/dog/1.jpg",
    "Zebra/1.jpg",
    ".hidden/1.jpg",
    "\u00e9l\u00e9phant/1.jpg",
    "top-level.jpg",
]


def grow(root: Path, files: list[str]) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"content of " + os.fsencode(file))
    return root


def samples(index: ImageFolder) -> list[tuple[str, int]]:
    return [(index.path(id), label) for id, label in enumerate(index.labels.tolist())]


def read_by_dali(paths: list[NDArray[np.uint8]]) -> list[bytes]:
    graph = Pipeline(batch_size=len(paths), num_threads=2, device_id=None, prefetch_queue_depth=1)
    with graph:
        graph.set_outputs(fn.io.file.read(fn.external_source(lambda: paths, dtype=types.UINT8, ndim=1)))
    graph.build()
    return [np.array(content).tobytes() for content in graph.run()[0]]


@pytest.fixture
def nasty(tmp_path: Path) -> Path:
    root = grow(tmp_path / "nasty", NASTY)
    grow(tmp_path / "elsewhere", ["1.jpg", "deep/2.jpg"])
    (root / "cat" / "link").symlink_to(tmp_path / "elsewhere")
    (root / "linked-class").symlink_to(tmp_path / "elsewhere")
    (root / "cat" / "dangling.jpg").symlink_to("nowhere")
    (root / "cat" / "itself.jpg").symlink_to("itself.jpg")
    (root / "cat" / os.fsdecode(b"\xff\xfe.jpg")).write_bytes(b"undecodable")
    return root


def test_same_as_torchvision(nasty: Path) -> None:
    theirs = torchvision.datasets.ImageFolder(str(nasty))
    ours = ImageFolder.scan(str(nasty))
    assert list(ours.classes) == theirs.classes
    assert samples(ours) == theirs.samples
    assert len(ours) == len(theirs.samples) > 25


def test_empty_class_stays_and_is_warned_about(nasty: Path, caplog: pytest.LogCaptureFixture) -> None:
    (nasty / "Aardvark" / "empty").mkdir(parents=True)
    ours = ImageFolder.scan(str(nasty))
    theirs = torchvision.datasets.ImageFolder(str(nasty), allow_empty=True)
    assert (list(ours.classes), samples(ours)) == (theirs.classes, theirs.samples)
    assert "no images in 1 of 7 classes: 'Aardvark'" in caplog.text


@pytest.mark.parametrize("target", [".", "..", "../..", "../../.."])
def test_link_to_a_folder_above_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, target: str) -> None:
    root = grow(tmp_path / "root", ["cat/a/1.jpg", "dog/2.jpg"])
    (root / "cat" / "a" / "loop").symlink_to(target)
    assert [path for path, _ in samples(ImageFolder.scan(str(root)))] == [f"{root}/cat/a/1.jpg", f"{root}/dog/2.jpg"]
    assert "which holds it" in caplog.text


def test_links_that_lead_to_each_other_end(tmp_path: Path) -> None:
    root = grow(tmp_path / "root", ["cat/1.jpg"])
    grow(tmp_path / "other", ["2.jpg"])
    (root / "cat" / "there").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(root / "cat")
    assert [path for path, _ in samples(ImageFolder.scan(str(root)))] == [
        f"{root}/cat/1.jpg",
        f"{root}/cat/there/2.jpg",
    ]


def test_relative_and_home_roots(nasty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(nasty.parent)
    monkeypatch.setenv("HOME", str(nasty.parent))
    assert ImageFolder.scan("nasty/").root == ImageFolder.scan("~/nasty").root == str(nasty)


def test_dali_reads_encoded_paths(nasty: Path) -> None:
    index = ImageFolder.scan(str(nasty))
    ids = np.array([id for id in range(len(index)) if os.path.exists(index.path(id))])[::-1]
    assert read_by_dali(index.encoded_paths(ids)) == [Path(index.path(int(id))).read_bytes() for id in ids]


def test_pickle_shares_its_buffers(nasty: Path) -> None:
    index = ImageFolder.scan(str(nasty))
    fingerprint = index.fingerprint
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(index, protocol=5, buffer_callback=buffers.append)
    copy = pickle.loads(data, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    assert np.shares_memory(copy.packed_paths, index.packed_paths)
    assert np.shares_memory(copy.labels, index.labels) and np.shares_memory(copy.offsets, index.offsets)
    assert samples(copy) == samples(index) and copy.fingerprint == fingerprint


def test_fingerprint_is_of_the_data_not_the_place(tmp_path: Path) -> None:
    def fingerprint(name: str, files: list[str]) -> str:
        return ImageFolder.scan(str(grow(tmp_path / name, files))).fingerprint

    base = fingerprint("base", ["a/1.jpg", "b/2.jpg"])
    assert fingerprint("moved", ["a/1.jpg", "b/2.jpg"]) == base
    others = [["a/1.jpg", "b/3.jpg"], ["a/1.jpg", "c/2.jpg"], ["a/1.jpg", "b/2.jpg", "c/x.txt"], ["a/1.jpg"]]
    assert len({base, *(fingerprint(str(n), files) for n, files in enumerate(others))}) == 5


def test_at_another_root(tmp_path: Path) -> None:
    index = ImageFolder.scan(str(grow(tmp_path, ["a/1.jpg"])))
    moved = index.at("s3://bucket/train/")
    assert moved.path(0) == "s3://bucket/train/a/1.jpg" and moved.fingerprint == index.fingerprint
    assert index.at("/").path(0) == "/a/1.jpg"


@pytest.mark.parametrize(
    ("root", "message"),
    [
        ("missing", "missing is missing"),
        ("file", "file is a file"),
        ("flat", "flat holds no class folders"),
        ("none", r"no images in the 2 class folders of .*none: need \.jpg"),
        ("http://host/x", "cannot read http://host/x"),
        ("s3:///x", "cannot read s3:///x"),
        ("gs://a b/x", "cannot read gs://a b/x"),
    ],
)
def test_what_cannot_be_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, message: str) -> None:
    grow(tmp_path, ["file", "flat/1.jpg", "none/a/1.txt", "none/b/2.txt"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=message) as error:
        ImageFolder.scan(root)
    assert "\n" not in str(error.value)


def test_unreadable_folder_is_an_error(nasty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: str) -> Iterator[os.DirEntry[str]]:
        if path.endswith("/cat/a"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)  # file modes do not stop root, who runs the tests in containers
    with pytest.raises(UsageError, match=r"cannot list '.*/cat/a': Permission denied"):
        ImageFolder.scan(str(nasty))


def test_check_classes(tmp_path: Path) -> None:
    train = ImageFolder.scan(str(grow(tmp_path / "train", [f"{c}/1.jpg" for c in "abcdef"])))
    val = ImageFolder.scan(str(grow(tmp_path / "val", [f"{c}/1.jpg" for c in "fg"])))
    check_classes(train, train.at("/elsewhere"))
    with pytest.raises(UsageError, match=r"val lacks 'a', 'b', 'c' and 2 more and has besides 'g', against the 6 cl"):
        check_classes(train, val)


def test_import_is_light() -> None:
    code = "import sys, raydali.data.image_folder; print(*{'ray', 'torch', 'pyarrow', 'nvidia'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "\n"


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))


def bare_walk(folder: str) -> int:
    files = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            files += bare_walk(entry.path) if entry.is_dir() else len(entry.name) > 0
    return files


@pytest.fixture
def many_files() -> Iterator[str]:
    order = np.random.default_rng(0).permutation(1000).tolist()
    with TemporaryDirectory(dir="/dev/shm") as root:
        for folder in range(50):
            os.mkdir(f"{root}/n{folder:08d}")
            for file in order:
                os.mknod(f"{root}/n{folder:08d}/n{folder:08d}_{file * 37}.JPEG")
        yield root


def test_speed(many_files: str) -> None:
    index = ImageFolder.scan(many_files)
    assert len(index) == bare_walk(many_files) == 50_000
    # In turns, so that a busy moment of the machine falls on both.
    calls = (lambda: bare_walk(many_files), lambda: ImageFolder.scan(many_files))
    bare, scan = map(min, zip(*([best_seconds(call, 2) for call in calls] for _ in range(6)), strict=True))
    assert scan <= 2 * bare
    ids = np.random.default_rng(1).integers(0, len(index), 256)
    assert best_seconds(lambda: index.encoded_paths(ids), 20) < 1e-3


def test_s3_is_as_local(s3: PutObjects, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    local = ImageFolder.scan(str(grow(tmp_path, NASTY)))
    markers = {"data/": b"", "data/cat/": b"", "data/cat/folder.jpg/": b"", "data-2/x/1.jpg": b"another prefix"}
    s3("nasty", {f"data/{file}": (tmp_path / file).read_bytes() for file in NASTY} | markers)
    remote = ImageFolder.scan("s3://nasty/data/")
    assert samples(remote) == samples(local.at("s3://nasty/data"))
    assert (remote.classes, remote.fingerprint) == (local.classes, local.fingerprint)
    assert not [record for record in caplog.records if record.name.startswith("raydali")]

    ids = np.random.default_rng(0).permutation(len(remote))
    assert read_by_dali(remote.encoded_paths(ids)) == [Path(local.path(id)).read_bytes() for id in ids.tolist()]


def test_s3_bucket_as_root_with_an_empty_class(s3: PutObjects, caplog: pytest.LogCaptureFixture) -> None:
    s3("root", {"cat/1.jpg": b"1", "dog/": b"", "readme.jpg": b"not in a class"})
    index = ImageFolder.scan("s3://root")
    assert (index.classes, samples(index)) == (("cat", "dog"), [("s3://root/cat/1.jpg", 0)])
    assert "no images in 1 of 2 classes: 'dog'" in caplog.text


def test_s3_errors(s3: PutObjects) -> None:
    s3("few", {"t/a/1.jpg": b"1", "odd/a/what?.jpg": b"1", "fine/a/what?.txt": b"", "fine/a/1.jpg": b"1"})
    for root, message in {
        "s3://no-such-bucket/t": "NO_SUCH_BUCKET",
        "s3://few/nowhere": "cannot list s3://few/nowhere: check the name, credentials and endpoint: [Errno 2]",
        "s3://few/t/a/1.jpg": "Path does not exist 'few/t/a/1.jpg/'",
        "s3://few/t/a": "s3://few/t/a holds no class folders",
        "s3://few/odd": "DALI cannot read 'few/odd/a/what?.jpg'",
    }.items():
        with pytest.raises(UsageError) as error:
            ImageFolder.scan(root)
        assert message in str(error.value) and "\n" not in str(error.value)
    assert len(ImageFolder.scan("s3://few/fine")) == 1


def test_s3_that_refuses(s3: PutObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403)
            self.end_headers()

    with serve(Refusal) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        with pytest.raises(UsageError, match=r"cannot list s3://few/t: check the name, credentials.*ACCESS_DENIED"):
            ImageFolder.scan("s3://few/t")


def test_gcs_is_as_local(gcs: dict[str, bytes], tmp_path: Path) -> None:
    local = ImageFolder.scan(str(grow(tmp_path, NASTY)))
    gcs.update({f"data/{file}": b"" for file in [*NASTY, "", "cat/", "cat/folder.jpg/"]})
    remote = ImageFolder.scan("gs://bucket/data")
    assert samples(remote) == samples(local.at("gs://bucket/data")) and remote.fingerprint == local.fingerprint
    for root in ("gs://bucket/nowhere", "gs://other/data"):
        with pytest.raises(UsageError, match=f"cannot list {root}: check the name"):
            ImageFolder.scan(root)


@pytest.mark.xfail(
    strict=True,
    raises=RuntimeError,
    reason="DALI 2.4.0's fn.io.file.read asks Google for a name with a NUL at its end",
)
def test_dali_reads_gcs(gcs: dict[str, bytes], tmp_path: Path) -> None:
    gcs["a/1.jpg"] = b"content"
    assert read_by_dali(ImageFolder.scan("gs://bucket").encoded_paths(np.array([0]))) == [b"content"]
