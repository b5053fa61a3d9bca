"""What counts as a sample of a tar shard and as its label, broken shards, the index and its cache."""

import io
import logging
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from raydali.data.index import tar, tar_headers
from raydali.data.index.formats import labeled_images
from raydali.data.index.tar import TarShards
from raydali.errors import UsageError
from tests.support.clocks import least_cpu_seconds
from tests.support.messages import mentioning, mentions
from tests.support.tars import Members, Pack, packed, samples

pytestmark = pytest.mark.usefixtures("tar_cache")


# ----------------------------------------------------------------------------------------------------------------------
# Samples and labels


def test_class_folders_in_a_tar(pack: Pack) -> None:
    made = {"dog/a.jpg": b"1", "cat/deep/b.PNG": b"22", "./cat/c.jpeg": b"333", "cat/README": b"no image"}
    shards = TarShards.scan(str(pack("0.tar", made)))
    assert shards.classes == ("cat", "dog")
    assert samples(shards) == [
        ("0.tar:dog|a.jpg", "dog", b"1"),
        ("0.tar:cat|deep|b.PNG", "cat", b"22"),
        ("0.tar:.|cat|c.jpeg", "cat", b"333"),
    ]


def test_numbers_are_classes_by_value(pack: Pack, caplog: pytest.LogCaptureFixture) -> None:
    made = {f"{i:06}.{kind}": data for i in range(12) for kind, data in (("jpg", b"%d" % i), ("cls", b" %d\n" % i))}
    shards = TarShards.scan(str(pack("0.tar", made)))
    assert shards.labels.tolist() == [*range(12)] and shards.classes == tuple(map(str, range(12)))
    assert caplog.text == ""
    shards = TarShards.scan(str(pack("1.tar", {"a.cls": b"7", "a.jpg": b"x", "b.jpg": b"y", "b.cls": b"10"})))
    assert shards.labels.tolist() == [0, 1] and shards.classes == ("7", "10")
    assert mentions(caplog.text, "2 classes 7 10")


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"cat/a.jpg": b"", "cat/a.cls": b"3", "cat/a.json": b'{"label": 4}', "cat/a.txt": b"dog"}, "3"),
        ({"cat/a.jpg": b"", "cat/a.json": b'{"label": 4}', "cat/a.txt": b"dog"}, "4"),
        ({"cat/a.jpg": b"", "cat/a.json": b'{"label": "cow"}'}, "cow"),
        ({"cat/a.jpg": b"", "cat/a.json": b'{"width": 3}', "cat/a.txt": b"a cat,\nsitting"}, "cat"),
        ({"a.jpg": b"", "a.json": b"[1]", "a.txt": b" d\xc3\xb6g \n"}, "d\u00f6g"),
    ],
)
def test_which_label_counts(pack: Pack, members: Members, expected: str) -> None:
    assert TarShards.scan(str(pack("0.tar", members))).classes == (expected,)


def test_class_folders_in_a_split(pack: Pack) -> None:
    both = {"train/cat/1.jpg": b"1", "train/dog/deep/2.jpg": b"2", "val/dog/3.jpg": b"3"}
    with pytest.raises(UsageError, match=mentioning("both.tar train val --data --val-data")):
        TarShards.scan(str(pack("both.tar", both)))
    for split in ("train", "Validation"):
        named = {f"./{split}/d\u00f6g/1.jpg": b"1", f"{split}/cat/2.jpg": b"2", f"{split}/d\u00f6g/3.jpg": b"3"}
        shards = TarShards.scan(str(pack(f"{split}.tar", named)))
        assert shards.classes == ("cat", "d\u00f6g") and shards.labels.tolist() == [1, 0, 1]
    vehicles = {"train/steam/1.jpg": b"1", "train/2.jpg": b"2"}
    assert TarShards.scan(str(pack("vehicles.tar", vehicles))).classes == ("train",)
    assert TarShards.scan(str(pack("more.tar", {**both, "car/1.jpg": b"4"}))).classes == ("car", "train", "val")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jpg": b"", "b.jpg": b"", "b.cls": b"1"}, "0.tar 1 2 .cls"),
        ({"a.jpg": b"", "a.cls": b"cat"}, "a.cls b'cat 0"),
        ({"a.jpg": b"", "a.cls": b"-1"}, "a.cls b'-1"),
        ({"a.jpg": b"", "a.json": b'{"label": -1}'}, "a.json b'-1"),
        ({"a.jpg": b"", "a.json": b"{"}, "a.json"),
        ({"a.jpg": b"", "a.txt": b"two\nlines"}, "a.txt two\\nlines"),
        ({"c/a.jpg": b"", "b.jpg": b"", "b.cls": b"1"}, "labels 1"),
        ({"c/a.jpg": b"", "c/a.png": b""}, "c/a c/a.jpg c/a.png"),
        ({"c/1.2.jpg": b"", "c/1.3.jpg": b""}, "c/1 c/1.2.jpg c/1.3.jpg"),
        ({"c/a.wav": b""}, "images 1 shard .jpg"),
        ({}, "images 1 shard"),
    ],
)
def test_what_has_no_clear_sample(pack: Pack, members: Members, message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        TarShards.scan(str(pack("0.tar", members)))


def test_other_images_beside_one_do_not_count(pack: Pack, caplog: pytest.LogCaptureFixture) -> None:
    made = {"c/a.seg.png": b"s", "c/a.jpg": b"a", "c/b.large.jpg": b"b", "c/only.txt": b"c", "c/._a.jpg": b"macOS"}
    shards = TarShards.scan(str(pack("0.tar", made)))
    assert [shards.read(id) for id in range(len(shards))] == [b"a", b"b"]
    assert mentions(caplog.text, "0.tar 1")


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_formats_of_tar(pack: Pack, format: int) -> None:
    long = f"{'c' * 90}/{'d' * 60}/{'f' * 70}.jpg" if format == tarfile.USTAR_FORMAT else f"{'c' * 200}/{'f' * 150}.jpg"
    made = {"\u00fcml\u00e4ut/1.jpg": b"first" * 1000, long: b"second", "z/3.jpg": b"third"}
    shards = TarShards.scan(str(pack("0.tar", made, format=format, mtime=1.5 if format == tarfile.PAX_FORMAT else 1)))
    assert [shards.path(id).partition(":")[2] for id in range(3)] == [*made]
    assert [shards.read(id) for id in range(3)] == [*made.values()]


def test_links_folders_and_large_numbers(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w", format=tarfile.GNU_FORMAT) as archive:
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE):
            info = tarfile.TarInfo(f"c/{kind!r}.jpg")
            info.type, info.linkname = kind, "x" * 150
            archive.addfile(info)
        info = tarfile.TarInfo("c/1.jpg")
        info.size, info.uid, info.mtime = 3, 1 << 40, 1 << 40
        archive.addfile(info, io.BytesIO(b"one"))
    shards = TarShards.scan(str(tmp_path / "0.tar"))
    assert len(shards) == 1 and shards.read(0) == b"one"
    assert [*shards.skipped.values()] == [2] and "linked" in next(iter(shards.skipped))


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_links_lead_to_files_of_the_archive(tmp_path: Path, caplog: pytest.LogCaptureFixture, format: int) -> None:
    long = f"{'d' * 80}/{'e' * 80}.jpg"
    links = [
        ("dog/1.jpg", tarfile.SYMTYPE, "../cat/2.jpg"),  # which stands behind it
        ("dog/2.jpg", tarfile.LNKTYPE, "./cat/1.jpg"),
        ("dog/3.jpg", tarfile.SYMTYPE, "1.jpg"),  # a link to a link
        ("dog/4.jpg", tarfile.LNKTYPE, long),
        ("dog/5.jpg", tarfile.SYMTYPE, "5.jpg"),
        ("dog/6.jpg", tarfile.SYMTYPE, "/cat/1.jpg"),
        ("dog/folder", tarfile.SYMTYPE, "../cat"),
    ]
    with tarfile.open(tmp_path / "0.tar", "w", format=format) as archive:
        for name in ("./cat/1.jpg", long):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            archive.addfile(info, io.BytesIO(name.encode()))
        for name, info.type, info.linkname in links:
            info.name, info.size = name, 0
            archive.addfile(info)
        info = tarfile.TarInfo("cat/2.jpg")
        info.size = 3
        archive.addfile(info, io.BytesIO(b"two"))
    shards = TarShards.scan(str(tmp_path))
    read = {shards.path(id).partition("0.tar:")[2]: shards.read(id) for id in range(len(shards))}
    files = {"./cat/1.jpg": b"./cat/1.jpg", long: long.encode(), "cat/2.jpg": b"two"}
    linked = {"dog/1.jpg": b"two", "dog/2.jpg": b"./cat/1.jpg", "dog/3.jpg": b"two", "dog/4.jpg": long.encode()}
    assert read == files | linked
    assert mentions(caplog.text, "2 skipped linked archive")


def test_joined_archives_are_read_to_the_end(pack: Pack, caplog: pytest.LogCaptureFixture) -> None:
    parts = [packed({f"c/{i}{j}.jpg": b"%d%d" % (i, j) for j in range(9)}) for i in range(3)]
    path = pack("0.tar", {})
    path.write_bytes(b"".join(parts) + bytes(99))
    shards = TarShards.scan(str(path))
    assert [shards.read(id) for id in range(len(shards))] == [b"%d%d" % (i, j) for i in range(3) for j in range(9)]
    assert not caplog.records
    path.write_bytes(b"".join(parts) + b"no archive" * 100)
    assert len(TarShards.scan(str(path))) == 27
    assert mentions(caplog.text, "0.tar 1,000")
    path.write_bytes(parts[0] + packed({"c/x.jpg": b"x" * 3000})[:2000])
    with pytest.raises(UsageError, match="it is cut off"):
        TarShards.scan(str(path))


def test_what_is_skipped_is_counted_by_kind(pack: Pack, caplog: pytest.LogCaptureFixture) -> None:
    made = {
        "c/1.jpg": b"",
        "c/1.depth.npy": b"",
        "c/2.jxl": b"",
        "c/2.json": b"{}",
        "d/3.HEIC": b"",
        "README": b"",
        "c/license.txt": b"",
    }
    hidden = {".ipynb_checkpoints/1.jpg": b"", "c/.cache/2.jpg": b"", "../up/1.jpg": b"", "c/./4.jpg": b""}
    shards = TarShards.scan(str(pack("0.tar", made | hidden)))
    assert [shards.path(id).partition(":")[2] for id in range(3)] == ["c/1.jpg", "../up/1.jpg", "c/./4.jpg"]
    assert shards.classes == ("..", "c")
    for _ in range(2):  # by the cache, too
        assert mentions(caplog.text, "4 2 1 .heic .jxl")
        caplog.clear()
        TarShards.scan(shards.root)


def test_members_beyond_8_gibibytes() -> None:
    """By headers alone: nobody writes so much for a test."""
    info = tarfile.TarInfo("big.jpg")
    info.size = 1 << 34
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        front = info.tobuf(format)

        def read(offset: int, length: int, front: bytes = front) -> bytes:
            return (front + bytes(length))[min(offset, len(front)) :][:length]

        assert [*tar_headers.members(read, len(front) + info.size + 1024)] == [(b"big.jpg", len(front), info.size)]


# ----------------------------------------------------------------------------------------------------------------------
# Broken shards


def test_broken_shards_are_named(pack: Pack, tmp_path: Path) -> None:
    whole = packed({"c/a.jpg": b"x" * 3000, "c/b.jpg": b"y" * 3000}, format=tarfile.GNU_FORMAT)
    pack("0.tar", {"c/a.jpg": b"x"})
    damaged = bytearray(whole)
    damaged[3584 + 150] ^= 1
    for content, message in {
        whole[:2000]: "1.tar c/a.jpg 1512",
        whole[:3584]: "1.tar 3584",
        whole[:4000]: "cut off 4000",
        whole[:5000]: "cut off c/b.jpg",
        b"": "tar archive",
        b"no tar" * 1000: "tar archive compressed",
        bytes(damaged): "damaged 3584",
    }.items():
        (tmp_path / "1.tar").write_bytes(content)
        with pytest.raises(UsageError, match=mentioning(f"1 2 {message}")):
            TarShards.scan(str(tmp_path))


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    for name in ("0.tar.gz", "0.tar"):
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("c/1.jpg"))
        with pytest.raises(UsageError, match=mentioning("decompress")):
            labeled_images(str(tmp_path / name))


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("c/1.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "0.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(UsageError, match=mentioning("--sparse")):
        TarShards.scan(str(tmp_path))


# ----------------------------------------------------------------------------------------------------------------------
# The index and its cache


def test_the_index_is_kept_until_a_shard_changes(pack: Pack, tar_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    part = tar._part

    def counted(path: str, size: int, **options: bool) -> Any:
        read.append(path)
        return part(path, size, **options)

    monkeypatch.setattr(tar, "_part", counted)
    for name in ("0.tar", "1.tar"):
        path = pack(f"d/{name}", {"cat/1.jpg": b"one", "dog/2.jpg": b"two"})
    first = TarShards.scan(str(path.parent))
    again = TarShards.scan(str(path.parent))
    assert len(read) == 2 and len([*tar_cache.iterdir()]) == 1
    assert samples(again) == samples(first) and again.fingerprint == first.fingerprint

    os.utime(path, ns=(1, 1))
    assert samples(TarShards.scan(str(path.parent))) == samples(first) and len(read) == 4
    pack("d/1.tar", {"cat/1.jpg": b"another", "cow/3.jpg": b"three", "cow/4.jpg": b"4"})
    changed = TarShards.scan(str(path.parent))
    assert len(changed) == 5 and changed.read(2) == b"another" and changed.classes == ("cat", "cow", "dog")
    pack("d/2.tar", {"cat/1.jpg": b"another"})
    assert len(TarShards.scan(str(path.parent))) == 6

    kept = max(tar_cache.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    kept.write_bytes(kept.read_bytes()[:1000])
    assert len(TarShards.scan(str(path.parent))) == 6


def test_a_cache_that_cannot_be_written_is_no_error(
    pack: Pack, tar_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tar_cache.parent.parent.write_text("a file")
    assert len(TarShards.scan(str(pack("0.tar", {"c/1.jpg": b""})))) == 1
    assert mentions(caplog.text, "index cannot write")


def test_ten_thousand_members_are_indexed_at_once(pack: Pack) -> None:
    made = {
        f"{i:05}.{kind}": data for i in range(5000) for kind, data in (("jpg", b"x" * 600), ("cls", b"%d" % (i % 9)))
    }
    path = str(pack("0.tar", made))

    def listed() -> None:
        with tarfile.open(path) as tar:
            assert len(tar.getmembers()) == 10_000

    def scanned() -> None:
        assert len(TarShards.scan(path)) == 5000

    assert least_cpu_seconds(scanned, 1) < 3 * least_cpu_seconds(listed, 1), "half of what Python's own reader takes"


def test_the_fingerprint_is_of_names_and_labels(pack: Pack, tmp_path: Path) -> None:
    made = {"1.jpg": b"", "1.cls": b"0", "2.jpg": b"", "2.cls": b"1"}
    base = TarShards.scan(str(pack("d/0.tar", made)))
    assert TarShards.scan(str(pack("e/0.tar", made | {"1.jpg": b"longer"}))).fingerprint == base.fingerprint
    others = [("d/0.tar", made | {"2.cls": b"0"}), ("d/1.tar", made), ("d/0.tar", made | {"3.jpg": b"", "3.cls": b"1"})]
    assert len({base.fingerprint, *(TarShards.scan(str(pack(f"f/{n}", m))).fingerprint for n, m in others)}) == 4
    moved = base.relocate(f"{tmp_path}/e/")
    assert moved.fingerprint == base.fingerprint and moved.path(0) == f"{tmp_path}/e/0.tar:1.jpg"
