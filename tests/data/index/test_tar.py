"""Tar shards by name, read at random, and in the stream."""

import os
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from raydali.data.index.formats import train_and_val
from raydali.data.index.labeled import LabeledFiles
from raydali.data.index.listing import find_files
from raydali.data.index.tar import TarShards, holds_shards
from raydali.data.load.make import make_loader
from raydali.data.read import contents, file_parts
from raydali.data.read.reading import reading_seconds
from raydali.data.read.storage import ObjectPart
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.errors import DataError, UsageError
from tests.support.messages import mentioning
from tests.support.object_stores import PutObjects
from tests.support.tars import Pack, packed, photographs, samples
from tests.support.trees import bytes_of

TRAIN = TrainImages(image_size=32, seed=3)
VALIDATION = ValidationImages(image_size=32, resize_size=40)

pytestmark = pytest.mark.usefixtures("tar_cache")


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
        assert all(Path(root, shard.name).stat().st_size == shard.size for shard in shards)
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
    with pytest.raises(UsageError, match=mentioning("3 5 val-2.tar val-3.tar val-4")):
        find_files("val-{0..4}.tar")
    with pytest.raises(UsageError, match=mentioning("/none")):
        find_files("none/val-{0..4}.tar")


def test_what_is_a_folder_of_shards(pack: Pack, tmp_path: Path) -> None:
    pack("shards/0.tar", {"c/a.jpg": b""})
    pack("unpacked/c.tar", {"c/a.jpg": b""})
    (tmp_path / "unpacked/c").mkdir()
    assert holds_shards(str(tmp_path / "shards")) and not holds_shards(str(tmp_path / "unpacked"))
    (tmp_path / "shards/itself").symlink_to("itself")
    assert holds_shards(str(tmp_path / "shards")) and len(TarShards.scan(str(tmp_path / "shards"))) == 1
    assert not holds_shards(str(tmp_path / "none")) and not holds_shards("ftp://host/folder")


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
    with pytest.raises(UsageError, match=mentioning("--data /train/0.tar --val-data")):
        train_and_val(f"{root}/train/0.tar")
    with pytest.raises(UsageError, match=mentioning("--root /x")):
        train_and_val(f"{root}/train/0.tar", f"{root}/val/0.tar", "/x")
    pack("data/val/0.tar", {"1.jpg": b"", "1.cls": b"11"})
    with pytest.raises(UsageError, match=mentioning("11 classes training")):
        train_and_val(root)


def test_folders_and_shards_together(pack: Pack, tmp_path: Path) -> None:
    for class_ in ("cat", "dog"):
        (tmp_path / "train" / class_).mkdir(parents=True)
        (tmp_path / "train" / class_ / "1.jpg").touch()
    pack("val/0.tar", {"dog/1.jpg": b""})
    train, val = train_and_val(str(tmp_path))
    assert isinstance(train, LabeledFiles) and val.labels.tolist() == [1] and val.classes == ("cat", "dog")


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


def test_contents_come_from_few_descriptors(shards: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_parts, "KEPT", 2)
    file_parts._kept.clear()  # what the index opened
    ids = np.random.default_rng(0).permutation(30)
    made = photographs(30)
    for _ in range(2):
        contents = shards.contents(ids)
        assert bytes_of(contents) == [made[id] for id in ids.tolist()]
        assert not any(np.asarray(content).flags.writeable for content in contents)
    assert shards.contents(np.array([], np.int64)) == []
    held = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    assert sum(file.startswith(shards.root) for file in held) == 2


def test_a_shard_that_shrinks_while_it_is_open_is_named(shards: TarShards, tmp_path: Path) -> None:
    copy = shards.relocate(str(shutil.copytree(shards.root, tmp_path / "copy")))
    shard = tmp_path / "copy/shard-000000.tar"
    assert copy.read(9) == photographs(30)[9]
    sound, size = shard.read_bytes(), shard.stat().st_size
    os.truncate(shard, int(copy.offsets[9]) + 10)
    with (
        make_loader("dali", copy, VALIDATION, OrderedPass(samples=30, batch_size=8)) as loader,
        pytest.raises(DataError, match=mentioning(f"shard-000000.tar {size}")),
    ):
        list(loader)
    shard.write_bytes(sound)
    assert copy.read(9) == photographs(30)[9]


def test_slow_storage_is_told_as_such(shards: TarShards, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(part: ObjectPart) -> bytes:
        time.sleep(0.05)
        return file_parts.read_part(part)

    monkeypatch.setattr(contents, "read_part", slow)
    for call in (lambda: shards.contents(np.arange(3)), lambda: shards.read(0)):
        before = reading_seconds()
        call()
        assert reading_seconds() - before >= 0.05


def test_pickles_carry_the_index_and_share_its_buffers(shards: TarShards) -> None:
    shards.contents(np.arange(30))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(shards, protocol=5, buffer_callback=buffers.append)
    copy = pickle.loads(data, buffers=[memoryview(buffer).toreadonly() for buffer in buffers])
    assert len(data) < 3000 and sum(memoryview(buffer).nbytes for buffer in buffers) < 100 * 30
    assert np.shares_memory(copy.labels, shards.labels) and np.shares_memory(copy.offsets, shards.offsets)
    assert samples(copy) == samples(shards)


def test_a_shard_that_changed_or_vanished_is_named(shards: TarShards, tmp_path: Path) -> None:
    gone = shards.relocate("/nowhere")
    with (
        make_loader("dali", gone, VALIDATION, OrderedPass(samples=30, batch_size=8)) as loader,
        pytest.raises(DataError, match=r"/nowhere/shard-00000\d\.tar:(cat|dog)/0000\d\d\.jpg"),
    ):
        next(iter(loader))
    shutil.copytree(shards.root, tmp_path / "copy")
    (tmp_path / "copy/shard-000000.tar").write_bytes(b"shorter")
    with pytest.raises(OSError, match=mentioning("shard-000000.tar:cat/000000.jpg 7")):
        shards.relocate(str(tmp_path / "copy")).read(0)


# ----------------------------------------------------------------------------------------------------------------------
# Object stores


def test_shards_in_s3(s3: PutObjects, shards: TarShards) -> None:
    objects = {f"data/train/{name}": Path(shards.root, name).read_bytes() for name in shards.shards}
    s3("shards", objects | {"data/val/0.tar": packed({"cat/1.jpg": b"one"}), "data/broken/0.tar": b"x" * 900})
    remote, val = train_and_val("s3://shards/data")
    assert isinstance(remote, TarShards) and len(val) == 1
    assert remote.path(12) == "s3://shards/data/train/shard-000001.tar:cat/000012.jpg"
    assert remote.fingerprint == shards.fingerprint
    assert TarShards.scan("s3://shards/data/train/shard-{000000..000002}.tar").fingerprint == shards.fingerprint
    assert pickle.loads(pickle.dumps(remote)).read(7) == shards.read(7)
    with pytest.raises(UsageError, match=mentioning("s3://shards/data/broken/0.tar")):
        TarShards.scan("s3://shards/data/broken")
    with pytest.raises(UsageError, match=mentioning("1 s3://shards/data/train x.tar")):
        TarShards.scan("s3://shards/data/train/x.tar")
    with pytest.raises(UsageError, match=mentioning("s3://nobucket")):
        TarShards.scan("s3://nobucket/train-{0..3}.tar")
    with pytest.raises(OSError, match=mentioning("s3://shards/gone/shard-000000.tar:cat/000000.jpg")):
        remote.relocate("s3://shards/gone").read(0)
