"""Tar shards: what counts as a sample and its label, the index and its cache, reading at random, the stream."""

import io
import logging
import os
import pickle
import shutil
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydali.data import tar_index, tar_members
from raydali.data.classification import TrainImages, ValidationImages
from raydali.data.image_folder import ImageFolder
from raydali.data.labeled_images import labeled_images, train_and_val
from raydali.data.loader import make_loader
from raydali.data.patterns import find_files
from raydali.data.stream import OrderedPass, Stream
from raydali.data.tar_shards import TarShards, is_shards
from raydali.errors import DataError, UsageError
from tests.data.object_stores import PutObjects
from tests.data.pictures import encoded, photograph

Members = dict[str, bytes]
Pack = Callable[..., Path]
TRAIN = TrainImages(image_size=32, seed=3)
VALIDATION = ValidationImages(image_size=32, resize_size=40)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/raydali/tar"


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
        (os.path.basename(path), shards.classes[label], shards.read(id))
        for id, label in enumerate(shards.labels.tolist())
        for path in [shards.path(id).replace("/", "|").replace(f"{shards.root}/".replace("/", "|"), "")]
    ]


def photographs(count: int) -> list[bytes]:
    return [encoded(photograph(("china", "flower")[i % 2], (60 + i, 90 - i))) for i in range(count)]


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
    assert "labels are not 0..1: sorted, '7', '10' are" in caplog.text


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


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jpg": b"", "b.jpg": b"", "b.cls": b"1"}, r"0\.tar: 1 of 2 samples have no label: a: give each a \.cls"),
        ({"a.jpg": b"", "a.cls": b"cat"}, r"a\.cls holds b'cat': a label must be a whole number from 0"),
        ({"a.jpg": b"", "a.cls": b"-1"}, r"a\.cls holds b'-1'"),
        ({"a.jpg": b"", "a.json": b'{"label": -1}'}, r"a\.json holds b'-1'"),
        ({"a.jpg": b"", "a.json": b"{"}, r"a\.json is no JSON"),
        ({"a.jpg": b"", "a.txt": b"two\nlines"}, r"a\.txt holds 'two\\nlines': a class's name must be one line"),
        ({"c/a.jpg": b"", "b.jpg": b"", "b.cls": b"1"}, "some labels are numbers, such as 1, and some names, such as"),
        ({"c/a.jpg": b"", "c/a.png": b""}, r"c/a has several images, c/a\.jpg and c/a\.png: a key, up to the first"),
        ({"c/1.2.jpg": b"", "c/1.3.jpg": b""}, r"c/1 has several images, c/1\.2\.jpg and c/1\.3\.jpg"),
        ({"c/a.wav": b""}, r"no images in the 1 shards in .*: need \.jpg"),
        ({}, "no images in the 1 shards"),
    ],
)
def test_what_has_no_clear_sample(pack: Pack, members: Members, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TarShards.scan(str(pack("0.tar", members)))


def test_other_images_beside_one_do_not_count(pack: Pack, caplog: pytest.LogCaptureFixture) -> None:
    made = {"c/a.seg.png": b"s", "c/a.jpg": b"a", "c/b.large.jpg": b"b", "c/only.txt": b"c", "c/._a.jpg": b"macOS"}
    shards = TarShards.scan(str(pack("0.tar", made)))
    assert [shards.read(id) for id in range(len(shards))] == [b"a", b"b"]
    assert "keys with a label but no image, which are left out: 1" in caplog.text


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


def test_members_beyond_8_gibibytes() -> None:
    """By headers alone: nobody writes so much for a test."""
    info = tarfile.TarInfo("big.jpg")
    info.size = 1 << 34
    for format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        front = info.tobuf(format)

        def read(offset: int, length: int, front: bytes = front) -> bytes:
            return (front + bytes(length))[min(offset, len(front)) :][:length]

        assert [*tar_members.members(read, len(front) + info.size + 1024)] == [(b"big.jpg", len(front), info.size)]


# ----------------------------------------------------------------------------------------------------------------------
# Broken shards


def test_broken_shards_are_named(pack: Pack, tmp_path: Path) -> None:
    whole = packed({"c/a.jpg": b"x" * 3000, "c/b.jpg": b"y" * 3000}, format=tarfile.GNU_FORMAT)
    pack("0.tar", {"c/a.jpg": b"x"})
    damaged = bytearray(whole)
    damaged[3584 + 150] ^= 1
    for content, message in {
        whole[:2000]: r"1\.tar: it is cut off: c/a\.jpg ends 1512 bytes behind its end",
        whole[:3584]: r"1\.tar: it is cut off after 3584 bytes, without the zeros at an archive's end",
        whole[:4000]: "it is cut off after 4000 bytes",
        whole[:5000]: r"it is cut off: c/b\.jpg ends",
        b"": "it is no tar archive",
        b"no tar" * 1000: "it is no tar archive, or a compressed one, which cannot be read at random: decompress it",
        bytes(damaged): "it is damaged at byte 3584, where a member should begin",
    }.items():
        (tmp_path / "1.tar").write_bytes(content)
        with pytest.raises(UsageError, match=f"1 of the 2 shards in .* cannot be indexed: .*{message}"):
            TarShards.scan(str(tmp_path))


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    for name in ("0.tar.gz", "0.tar"):
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("c/1.jpg"))
        with pytest.raises(UsageError, match="cannot be read at random: decompress it"):
            labeled_images(str(tmp_path / name))


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("c/1.jpg")
    info.type = tarfile.GNUTYPE_SPARSE
    (tmp_path / "0.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(UsageError, match=r"it holds a sparse file, .*: pack it without --sparse"):
        TarShards.scan(str(tmp_path))


# ----------------------------------------------------------------------------------------------------------------------
# Naming shards


def test_patterns(pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8, 12):
        pack(f"d/train-{i:04}.tar", {"c/a.jpg": b"%d" % i})
    pack("d/x/val-0.tar", {"c/a.jpg": b"v"})
    pack("d/x/val-1.tar", {"c/a.jpg": b"v"})
    pack("d/odd [1].tar", {"c/a.jpg": b"v"})

    def found(pattern: str) -> list[str]:
        root, shards = find_files(pattern)
        assert all(os.path.getsize(f"{root}/{shard.name}") == shard.size for shard in shards)
        return [f"{root}/{shard.name}".removeprefix(f"{tmp_path}/") for shard in shards]

    four = [f"d/train-{i:04}.tar" for i in range(8, 12)]
    assert found(f"{tmp_path}/d/train-{{0008..0011}}.tar") == four
    assert found(f"{tmp_path}/d/train-*.tar") == found(f"{tmp_path}/d/train-????.tar") == four
    assert sorted(found(f"{tmp_path}/d/train-00{{08,1{{0..1}},09}}.tar")) == four
    assert found(f"{tmp_path}/d/{{train-0008,x/val-*}}.tar") == [four[0], "d/x/val-0.tar", "d/x/val-1.tar"]
    assert found(f"{tmp_path}/d/odd [1].tar") == ["d/odd [1].tar"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert found("d/x/val-{0..1}.tar") == found("~/d/x/val-*.tar") == ["d/x/val-0.tar", "d/x/val-1.tar"]
    monkeypatch.chdir(tmp_path / "d/x")
    assert found("val-0.tar") == found("val-[0].tar") == ["d/x/val-0.tar"]
    with pytest.raises(UsageError, match=r"3 of the 5 files .* are missing in .*: 'val-2\.tar', 'val-3\.tar', 'val-4"):
        find_files("val-{0..4}.tar")
    with pytest.raises(UsageError, match=r"cannot list .*/none: No such file or directory: give a folder"):
        find_files("none/val-{0..4}.tar")


def test_what_is_a_folder_of_shards(pack: Pack, tmp_path: Path) -> None:
    pack("shards/0.tar", {"c/a.jpg": b""})
    pack("unpacked/c.tar", {"c/a.jpg": b""})
    (tmp_path / "unpacked/c").mkdir()
    assert is_shards(str(tmp_path / "shards")) and not is_shards(str(tmp_path / "unpacked"))
    assert is_shards("s3://bucket/{0..9}.tar") and is_shards("none.tar") and not is_shards(str(tmp_path / "none"))
    assert not is_shards("ftp://host/folder")


def test_training_and_validation(pack: Pack, tmp_path: Path) -> None:
    numbered = {f"{i}.{kind}": b"%d" % i for i in range(11) for kind in ("jpg", "cls")}
    pack("data/train/0.tar", numbered)
    pack("data/val/0.tar", {"1.jpg": b"", "1.cls": b"10"})
    root = str(tmp_path / "data")
    for train, val in (
        train_and_val(f"{root}/"),
        train_and_val(f"{root}/train", f"{root}/val"),
        train_and_val(f"{root}/train/{{0..0}}.tar", f"{root}/val/*.tar"),
    ):
        assert isinstance(train, TarShards) and isinstance(val, TarShards)
        assert len(train) == 11 and val.labels.tolist() == [10] and val.classes == train.classes
    with pytest.raises(UsageError, match=r"--data .*/train/0\.tar names training shards alone: give --val-data"):
        train_and_val(f"{root}/train/0.tar")
    with pytest.raises(UsageError, match="--root /x is of no use"):
        train_and_val(f"{root}/train/0.tar", f"{root}/val/0.tar", "/x")
    pack("data/val/0.tar", {"1.jpg": b"", "1.cls": b"11"})
    with pytest.raises(UsageError, match="'11' is none of the 11 classes of the training set"):
        train_and_val(root)


def test_folders_and_shards_together(pack: Pack, tmp_path: Path) -> None:
    for class_ in ("cat", "dog"):
        (tmp_path / "train" / class_).mkdir(parents=True)
        (tmp_path / "train" / class_ / "1.jpg").touch()
    pack("val/0.tar", {"dog/1.jpg": b""})
    train, val = train_and_val(str(tmp_path))
    assert isinstance(train, ImageFolder) and val.labels.tolist() == [1] and val.classes == ("cat", "dog")


# ----------------------------------------------------------------------------------------------------------------------
# The index and its cache


def test_the_index_is_kept_until_a_shard_changes(pack: Pack, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    part = tar_index._part

    def counted(path: str, size: int) -> Any:
        read.append(path)
        return part(path, size)

    monkeypatch.setattr(tar_index, "_part", counted)
    for name in ("0.tar", "1.tar"):
        path = pack(f"d/{name}", {"cat/1.jpg": b"one", "dog/2.jpg": b"two"})
    first = TarShards.scan(str(path.parent))
    again = TarShards.scan(str(path.parent))
    assert len(read) == 2 and len([*cache.iterdir()]) == 1
    assert samples(again) == samples(first) and again.fingerprint == first.fingerprint

    os.utime(path, ns=(1, 1))
    assert samples(TarShards.scan(str(path.parent))) == samples(first) and len(read) == 4
    pack("d/1.tar", {"cat/1.jpg": b"another", "cow/3.jpg": b"three", "cow/4.jpg": b"4"})
    changed = TarShards.scan(str(path.parent))
    assert len(changed) == 5 and changed.read(2) == b"another" and changed.classes == ("cat", "cow", "dog")
    pack("d/2.tar", {"cat/1.jpg": b"another"})
    assert len(TarShards.scan(str(path.parent))) == 6

    kept = max(cache.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    kept.write_bytes(kept.read_bytes()[:1000])
    assert len(TarShards.scan(str(path.parent))) == 6


def test_a_cache_that_cannot_be_written_is_no_error(pack: Pack, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache.parent.parent.write_text("a file")
    assert len(TarShards.scan(str(pack("0.tar", {"c/1.jpg": b""})))) == 1
    assert "the index is not kept for the next run: cannot write" in caplog.text


def test_ten_thousand_members_are_indexed_at_once(pack: Pack) -> None:
    made = {
        f"{i:05}.{kind}": data for i in range(5000) for kind, data in (("jpg", b"x" * 600), ("cls", b"%d" % (i % 9)))
    }
    path = str(pack("0.tar", made))
    began = time.process_time()
    assert len(TarShards.scan(path)) == 5000
    assert time.process_time() - began < 1


def test_the_fingerprint_is_of_names_and_labels(pack: Pack, tmp_path: Path) -> None:
    made = {"1.jpg": b"", "1.cls": b"0", "2.jpg": b"", "2.cls": b"1"}
    base = TarShards.scan(str(pack("d/0.tar", made)))
    assert TarShards.scan(str(pack("e/0.tar", made | {"1.jpg": b"longer"}))).fingerprint == base.fingerprint
    others = [("d/0.tar", made | {"2.cls": b"0"}), ("d/1.tar", made), ("d/0.tar", made | {"3.jpg": b"", "3.cls": b"1"})]
    assert len({base.fingerprint, *(TarShards.scan(str(pack(f"f/{n}", m))).fingerprint for n, m in others)}) == 4
    moved = base.at(f"{tmp_path}/e/")
    assert moved.fingerprint == base.fingerprint and moved.path(0) == f"{tmp_path}/e/0.tar:1.jpg"


# ----------------------------------------------------------------------------------------------------------------------
# Reading


@pytest.fixture
def shards(pack: Pack) -> TarShards:
    """30 photographs of 2 classes in 3 shards."""
    made = photographs(30)
    for i in range(3):
        members = {f"{('cat', 'dog')[id % 2]}/{id:06}.jpg": made[id] for id in range(i * 10, i * 10 + 10)}
        path = pack(f"train/shard-{i:06}.tar", members)
    return TarShards.scan(str(path.parent))


def test_local_contents_are_slices_of_mapped_shards(shards: TarShards) -> None:
    ids = np.random.default_rng(0).permutation(30)
    contents = shards.files(ids)
    made = photographs(30)
    assert [content.tobytes() for content in contents] == [made[id] for id in ids.tolist()]
    twice = shards.files(ids), shards.files(ids)
    assert all(np.shares_memory(one, two) for one, two in zip(*twice, strict=True))
    assert not any(content.flags.owndata or content.flags.writeable for content in contents)
    assert shards.files(np.array([], np.int64)) == []
    held = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not any(file.endswith(".tar") for file in held)


def test_pickles_carry_the_index_and_share_its_buffers(shards: TarShards) -> None:
    shards.files(np.arange(30))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(shards, protocol=5, buffer_callback=buffers.append)
    copy = pickle.loads(data, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    assert len(data) < 3000 and sum(memoryview(buffer).nbytes for buffer in buffers) < 100 * 30
    assert np.shares_memory(copy.labels, shards.labels) and np.shares_memory(copy.offsets, shards.offsets)
    assert samples(copy) == samples(shards)


def test_a_shard_that_changed_or_vanished_is_named(shards: TarShards, tmp_path: Path) -> None:
    gone = shards.at("/nowhere")
    with (
        make_loader("dali", gone, VALIDATION, OrderedPass(samples=30, batch_size=8)) as loader,
        pytest.raises(DataError, match=r"/nowhere/shard-00000\d\.tar:(cat|dog)/0000\d\d\.jpg"),
    ):
        next(iter(loader))
    shutil.copytree(shards.root, tmp_path / "copy")
    (tmp_path / "copy/shard-000000.tar").write_bytes(b"shorter")
    with pytest.raises(OSError, match=r"shard-000000\.tar:cat/000000\.jpg: the shard has 7 bytes, and had \d+ when it"):
        shards.at(str(tmp_path / "copy")).read(0)


@pytest.fixture
def folders(shards: TarShards, tmp_path: Path) -> ImageFolder:
    """The same images in class folders; ids differ."""
    for id, label in enumerate(shards.labels.tolist()):
        path = tmp_path / "folders" / shards.classes[label] / f"{id:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(shards.read(id))
    return ImageFolder.scan(str(tmp_path / "folders"))


def test_pixels_are_those_of_class_folders(shards: TarShards, folders: ImageFolder) -> None:
    order = OrderedPass(samples=30, batch_size=8)

    def pixels(source: TarShards | ImageFolder) -> dict[str, tuple[torch.Tensor, int]]:
        found: dict[str, tuple[torch.Tensor, int]] = {}
        with make_loader("dali", source, VALIDATION, order) as loader:
            for batch in loader:
                names = [os.path.basename(source.path(id)) for id in batch.ids.tolist()]
                found |= dict(zip(names, zip(batch["images"], batch["labels"].tolist(), strict=True), strict=True))
        return found

    ours, theirs = pixels(shards), pixels(folders)
    assert ours.keys() == theirs.keys() and len(ours) == 30
    assert all(torch.equal(ours[key][0], theirs[key][0]) and ours[key][1] == theirs[key][1] for key in ours)
    image, label = VALIDATION.sample(shards, 3, 0)  # what the torch loader runs
    same, _ = VALIDATION.sample(folders, [folders.path(id)[-10:] for id in range(30)].index("000003.jpg"), 0)
    assert torch.equal(image, same) and label == 1


def test_every_image_once_across_a_resume_on_other_workers(shards: TarShards) -> None:
    stream = Stream(samples=30, epochs=2, batch_size=2, global_batch_size=6, seed=1, shuffle_block=7)

    def consume(world_size: int, start: int, steps: int) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        for rank in range(world_size):
            options: dict[str, Any] = {"rank": rank, "world_size": world_size, "start": start}
            with make_loader("dali", shards, TRAIN, stream, **options) as loader:
                for batch in loader:
                    if batch.micro_batch.step < start + steps:
                        assert batch["labels"].tolist() == shards.labels[batch.ids].tolist()
                        seen += zip(batch.micro_batch.epochs.tolist(), batch.ids.tolist(), strict=True)
        return seen

    consumed = [*consume(1, 0, 4), *consume(3, 4, 6)]
    assert Counter(consumed) == Counter((epoch, id) for epoch in range(2) for id in range(30))


# ----------------------------------------------------------------------------------------------------------------------
# Object stores


def test_shards_in_s3(s3: PutObjects, shards: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = {f"data/train/{name}": Path(shards.root, name).read_bytes() for name in shards.shards}
    s3("shards", objects | {"data/val/0.tar": packed({"cat/1.jpg": b"one"}), "data/broken/0.tar": b"x" * 900})
    remote, val = train_and_val("s3://shards/data")
    assert isinstance(remote, TarShards) and len(val) == 1
    assert remote.path(12) == "s3://shards/data/train/shard-000001.tar:cat/000012.jpg"
    assert remote.fingerprint == shards.fingerprint
    assert TarShards.scan("s3://shards/data/train/shard-{000000..000002}.tar").fingerprint == shards.fingerprint
    ids = np.random.default_rng(0).permutation(30)
    assert [content.tobytes() for content in remote.files(ids)] == [shards.read(id) for id in ids.tolist()]
    assert pickle.loads(pickle.dumps(remote)).read(7) == shards.read(7)

    stream = Stream(samples=30, epochs=1, batch_size=5, global_batch_size=10, seed=1)
    with make_loader("dali", remote, TRAIN, stream) as ours, make_loader("dali", shards, TRAIN, stream) as theirs:
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one["images"], other["images"])

    with pytest.raises(UsageError, match=r"s3://shards/data/broken/0\.tar: it is no tar archive"):
        TarShards.scan("s3://shards/data/broken")
    with pytest.raises(UsageError, match=r"1 of the 1 files .* are missing in s3://shards/data/train: 'x\.tar'"):
        TarShards.scan("s3://shards/data/train/x.tar")
    with pytest.raises(UsageError, match="cannot list s3://nobucket"):
        TarShards.scan("s3://nobucket/train-{0..3}.tar")
    with pytest.raises(OSError, match=r"cannot read s3://shards/gone/shard-000000\.tar:cat/000000\.jpg"):
        remote.at("s3://shards/gone").read(0)
