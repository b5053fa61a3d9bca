"""`raydali prepare` into tar shards, Parquet and folders, of any source, on a disk and in a bucket."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import psutil
import pytest

from raydali.commands.prepare import Prepare, main
from raydali.commands.split_copies import ROWS
from raydali.data.decode.pillow import decoded
from raydali.data.index.formats import labeled_images, train_and_val
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.errors import DataError, UsageError
from tests.support.broken import CONTENTS, damage, jpeg
from tests.support.disks import small_disk
from tests.support.messages import mentioning, mentions
from tests.support.object_stores import PutObjects
from tests.support.parquets import write_parquet
from tests.support.pictures import encoded, photograph
from tests.support.tars import packed
from tests.support.tfrecords import tfrecords

RAYDALI = str(Path(sys.executable).with_name("raydali"))
KINDS = "tar", "parquet"
SLOWER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("folder", "parquet")]
SLOWER_SIZES = [pytest.param(*each, marks=pytest.mark.slow) for each in (("tar", 32), ("parquet", 0))]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of shards are kept for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def prepare(source: object, target: object, to: Any, side: int = 0, **options: Any) -> None:
    options = {"workers": 1, "shard_size": 1} | options
    main(Prepare(source=str(source), target=str(target), to=to, shorter_side=side, **options))


def record(target: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((target / "prepared.json").read_text())
    return read


def samples(source: LabeledSource) -> list[tuple[str, bytes]]:
    return [(source.classes[source.labels[id]], source.read(id)) for id in range(len(source))]


@pytest.fixture
def images() -> list[bytes]:
    """Twelve different photographs, of 60 to 71 pixels; padded, so that a shard of 1 MB holds few of them."""
    return [encoded(photograph(size=(80 + i, 60 + i))) + bytes(400_000) for i in range(12)]


@pytest.fixture
def source(tmp_path: Path, images: list[bytes]) -> Path:
    """Class folders, train/ and val/, with names that would be one key of WebDataset."""
    for i, image in enumerate(images):
        split = "val" if i % 4 == 3 else "train"
        path = tmp_path / "source" / split / ("cat", "dog.breed")[i // 6] / f"{i:02}.large.{i}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
    (tmp_path / "source/train/cat/00.jpg").write_bytes(jpeg((90, 70)))
    for path in (tmp_path / "source").rglob("*.[jJ]*"):
        os.utime(path, (1.7e9, 1.7e9))  # a bucket's times are whole seconds: copies of this second's files are remade
    return tmp_path / "source"


@pytest.mark.parametrize(("to", "side"), [("tar", 0), ("parquet", 32), *SLOWER_SIZES])
def test_class_folders(to: str, side: int, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "target"
    prepare(source, target, to, side, workers=2)
    assert mentions(capsys.readouterr().out, f"13 images {0 if side else 13} copied 0 broken")
    for before, after in zip(train_and_val(str(source)), train_and_val(str(target)), strict=True):
        assert after.classes == before.classes == ("cat", "dog.breed")
        assert after.labels.tolist() == before.labels.tolist()
        if not side:
            assert samples(after) == samples(before)
        else:
            assert {min(decoded(after.read(id)).size) for id in range(len(after))} == {32}
    of_shards = record(target)["shards"]
    assert sum(shard["images"] for shard in of_shards) == 13 and record(target)["complete"] is True
    for shard in of_shards:
        content = (target / shard["name"]).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (shard["bytes"], shard["sha256"])
    shards = sorted(str(path.relative_to(target)) for path in target.rglob(f"*.{to}"))
    assert shards == sorted(shard["name"] for shard in of_shards)
    assert len(shards) == (2 if to == "parquet" or side else 6)
    main(Prepare(source=str(target), target=str(tmp_path / "back"), shorter_side=0, workers=1))
    if not side:
        for before, after in zip(train_and_val(str(source)), train_and_val(str(tmp_path / "back")), strict=True):
            assert samples(after) == samples(before)


def test_names_in_shards(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "tar", "tar", shard_size=100)
    names = [path.rpartition(":")[2] for path in map(labeled_images(f"{tmp_path}/tar/train").path, range(4))]
    assert names[:2] == ["cat/00.jpg", "cat/00_large_0.jpeg"]
    prepare(source, tmp_path / "parquet", "parquet")
    from pyarrow import parquet

    rows = parquet.read_table(tmp_path / "parquet/train/train-000000.parquet").to_pylist()
    assert [row["image"]["path"] for row in rows[:2]] == ["00.jpg", "00.large.0.JPEG"]


@pytest.mark.parametrize("to", ["tar", *SLOWER])
@pytest.mark.parametrize("kind", ["list", "tar", "parquet"])
def test_other_sources(kind: str, to: str, images: list[bytes], tmp_path: Path) -> None:
    """With classes in another order than that of their names: 0, 2, 10."""
    labels = [(0, 10, 2)[i % 3] for i in range(len(images))]
    for i, image in enumerate(images):
        (tmp_path / f"{i}.jpg").write_bytes(image)
    if kind == "list":
        data = tmp_path / "list.csv"
        data.write_text("".join(f"{i}.jpg,{label}\n" for i, label in enumerate(labels)))
    elif kind == "tar":
        data = tmp_path / "shard-0.tar"
        members = [(f"{i}.{end}", (images[i], b"%d" % label)[end == "cls"]) for i, label in enumerate(labels)
                   for end in ("jpg", "cls")]  # fmt: skip
        data.write_bytes(packed(dict(members)))
    else:
        data = write_parquet(tmp_path / "data.parquet", images, labels)
    before = labeled_images(str(data))
    assert before.classes == ("0", "2", "10")
    prepare(data, tmp_path / "target", to)
    after = labeled_images(str(tmp_path / "target"))
    assert after.classes == (("00", "02", "10") if to == "folder" else before.classes)
    by_class = np.argsort(before.labels, kind="stable") if to == "folder" else np.arange(len(before))
    assert after.labels.tolist() == before.labels[by_class].tolist()
    assert [after.read(id) for id in range(len(after))] == [before.read(id) for id in by_class.tolist()]


@pytest.mark.parametrize("to", ["tar", *SLOWER])
def test_sources_without_names_of_files(to: str, images: list[bytes], tmp_path: Path) -> None:
    """TFRecord files, and both splits of Parquet files, whose grey images are PNM files."""
    records = tmp_path / "of.tfrecord"
    records.write_bytes(tfrecords((image, i // 6) for i, image in enumerate(images)))
    for split, count in (("train", 8), ("test", 4)):
        grey = [encoded(photograph(size=(40 + i, 30)).convert("L"), "PPM") for i in range(count)]
        write_parquet(tmp_path / f"rows/{split}.parquet", grey, [i // (count // 2) for i in range(count)])
    prepare(records, tmp_path / "of-records", to)
    assert samples(labeled_images(str(tmp_path / "of-records"))) == samples(labeled_images(str(records)))
    prepare(tmp_path / "rows", tmp_path / "of-rows", to)
    rows, made = (train_and_val(str(tmp_path / name)) for name in ("rows", "of-rows"))
    assert [*map(samples, made)] == [*map(samples, rows)]
    assert made[0].path(0).endswith("#0" if to == "parquet" else "0.ppm")


def test_names_of_classes_in_another_order(
    images: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_parquet(tmp_path / "data.parquet", images, [i % 2 for i in range(12)], names=["tench", "goldfish"])
    with pytest.raises(UsageError, match=mentioning("tench goldfish --to parquet")):
        prepare(data, tmp_path / "folder", "folder")
    prepare(data, tmp_path / "tar", "tar")
    assert mentions(caplog.text, "numbers --to parquet")
    assert labeled_images(str(tmp_path / "tar")).labels.tolist() == [i % 2 for i in range(12)]
    prepare(data, tmp_path / "parquet", "parquet")
    after = labeled_images(str(tmp_path / "parquet"))
    assert after.classes == ("tench", "goldfish") and after.labels.tolist() == [i % 2 for i in range(12)]


def test_a_class_without_images(source: Path, images: list[bytes], tmp_path: Path) -> None:
    for split in ("train", "val"):
        (source / split / "ant").mkdir()
    with pytest.raises(UsageError, match=mentioning("ant tar --to parquet")):
        prepare(source, tmp_path / "tar", "tar")
    assert not (tmp_path / "tar").exists()
    prepare(source, tmp_path / "parquet", "parquet")
    assert train_and_val(str(tmp_path / "parquet"))[0].classes == ("ant", "cat", "dog.breed")
    numbers = write_parquet(tmp_path / "n.parquet", images, [0, 10] * 6, names=[str(i) for i in range(11)])
    with pytest.raises(UsageError, match=mentioning("'1' '2' tar --to parquet")):
        prepare(numbers, tmp_path / "tar", "tar")


def test_rows_keep_their_ids(tmp_path: Path) -> None:
    """Over several files, in each of which groups of rows are whole."""
    count = 3 * ROWS + 20
    for i in range(count):
        path = tmp_path / "source" / str(i % 2) / f"{i:04}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg() + b"%d" % i + bytes(10_000))
    prepare(tmp_path / "source", tmp_path / "target", "parquet")
    assert len([*(tmp_path / "target").glob("*.parquet")]) == 4
    before, after = (labeled_images(str(tmp_path / name)) for name in ("source", "target"))
    assert samples(after) == samples(before)


@pytest.mark.parametrize("to", ["tar", SLOWER[1]])
def test_broken_images(to: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All kinds of damage are found by resizing, and their shards are made again when they are repaired."""
    paths = sorted((source / "train").rglob("*.JPEG"))[: len(CONTENTS)]
    broken = dict(zip(paths, CONTENTS, strict=False))
    for path, kind in broken.items():
        path.write_bytes(encoded(photograph(size=(300, 200))))
        damage(path, kind)
    with pytest.raises(DataError, match=mentioning(f"{len(broken)} 13 broken")):
        prepare(source, tmp_path / "target", to, side=32)
    told = capsys.readouterr().out
    assert all(f"{path}: " in told for path in broken)
    assert sum(shard["broken"] for shard in record(tmp_path / "target")["shards"]) == len(broken)
    for path in broken:
        path.write_bytes(jpeg())
    prepare(source, tmp_path / "target", to, side=32)
    after = labeled_images(f"{tmp_path}/target/train")
    assert after.labels.tolist() == LabeledFiles.scan(f"{source}/train").labels.tolist()


def test_a_truncated_image_is_found_without_decoding(source: Path, tmp_path: Path) -> None:
    whole = encoded(photograph(size=(300, 200)))
    for name, content in {"cut": whole[:-2000], "empty": b"", "text": b"no image"}.items():
        (source / f"train/cat/{name}.jpg").write_bytes(content)
    with pytest.raises(DataError, match=mentioning("3 16 broken")):
        prepare(source, tmp_path / "target", "tar")


@pytest.mark.parametrize("to", ["tar", SLOWER[1]])
def test_damaged_and_changed_shards_are_made_again(
    to: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "target"
    prepare(source, target, to)
    was = {path: path.read_bytes() for path in target.rglob(f"*.{to}")}
    first, last = min(was), max(was)
    content = bytearray(was[first])
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    last.unlink()
    prepare(source, target, to)
    told = capsys.readouterr().out.splitlines()[-1]
    assert mentions(told, f"2 damaged {first} {last}")
    assert {path: path.read_bytes() for path in target.rglob(f"*.{to}")} == was
    times = {path: path.stat().st_mtime_ns for path in was}
    changed = source / "train/cat/00.jpg"
    changed.write_bytes(jpeg((77, 66)))
    os.utime(changed, (1e9, 1e9))
    prepare(source, target, to)
    again = [path for path in was if path.stat().st_mtime_ns != times[path]]
    assert again == [first] and first.read_bytes() != was[first]
    assert "damaged shard" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("to", KINDS)
def test_a_killed_command_goes_on(to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo = encoded(photograph(size=(900, 700)))
    source, target = tmp_path / "source", tmp_path / "target"
    for i in range(600):
        path = source / str(i % 3) / f"{i:03}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo + b"%d" % i)
    command = [RAYDALI, "prepare", str(source), str(target), "--workers", "2"]
    command += ["--to", to, "--shorter-side", "300", "--shard-size", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while len([*target.glob(".*.json")]) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert not psutil.wait_procs(started, timeout=60)[1]
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and record(target)["complete"] is False
    made = {entry["name"]: entry["images"] for entry in map(json.loads, map(Path.read_text, target.glob(".*.json")))}
    times = {name: (target / name).stat().st_mtime_ns for name in made}
    assert len(made) >= 2 and sum(made.values()) < 600
    prepare(source, target, to, 300, workers=2)
    assert f"{sum(made.values())} done before" in capsys.readouterr().out
    assert {name: (target / name).stat().st_mtime_ns for name in made} == times
    before, after = labeled_images(str(source)), labeled_images(str(target))
    assert len(after) == 600 and after.labels.tolist() == before.labels.tolist()
    assert not [*target.rglob(".*.part")]


def test_other_settings_are_refused(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "target", "tar")
    for to, options, message in (
        ("parquet", {}, "was made of --to tar, not of --to parquet: give another target, or remove it"),
        ("folder", {}, "was made of --to tar, not of --to folder"),
        ("tar", {"shard_size": 2}, "was made of --shard-size 1, not of --shard-size 2"),
        ("tar", {"side": 32}, "was made of --shorter-side 0, not of --shorter-side 32"),
    ):
        with pytest.raises(UsageError, match=message):
            prepare(source, tmp_path / "target", to, **options)
    with pytest.raises(UsageError, match="--shard-size must be at least 1, not 0"):
        prepare(source, tmp_path / "target", "tar", shard_size=0)
    with pytest.raises(UsageError, match=mentioning("--root lists")):
        prepare(source, tmp_path / "new", "tar", root="/")


@pytest.mark.parametrize("to", KINDS)
def test_a_full_disk(to: str, source: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", kilobytes=3000) as disk:
        target, before = disk.path / "target", {*threading.enumerate()}
        with pytest.raises(DataError, match=mentioning(f"{target}/train/ space left room")) as failure:
            prepare(source, target, to)
        assert not [*target.rglob(".*.part")]
    left = [thread.name for thread in {*threading.enumerate()} - before if "readers" not in thread.name]
    assert not left, f"threads that only a collection of garbage ends, after {failure}"


@pytest.mark.parametrize("to", ["tar", *SLOWER])
def test_a_bucket(to: str, s3: PutObjects, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bucket = f"prepared-{to}"
    with pytest.raises(UsageError, match=f"s3://{bucket}/set cannot be listed: check name, credentials and endpoint"):
        prepare(source, f"s3://{bucket}/set", to)
    s3(bucket, {"other": b""})
    prepare(source, f"s3://{bucket}/set", to, workers=2)
    for before, after in zip(train_and_val(str(source)), train_and_val(f"s3://{bucket}/set"), strict=True):
        assert after.classes == before.classes and samples(after) == samples(before)
    client = boto3.client("s3")
    made = client.list_objects_v2(Bucket=bucket, Prefix="set/")["Contents"]
    shard = next(each["Key"] for each in made if each["Key"].endswith((f".{to}", "0.jpg", "0.JPEG")))
    content = client.get_object(Bucket=bucket, Key=shard)["Body"].read()
    client.put_object(Bucket=bucket, Key=shard, Body=b"")
    capsys.readouterr()
    prepare(source, f"s3://{bucket}/set", to)
    assert re.search(r" [1-9]\d* done before", capsys.readouterr().out)
    assert client.get_object(Bucket=bucket, Key=shard)["Body"].read() == content
    with pytest.raises(UsageError, match=mentioning("overlap")):
        prepare(f"s3://{bucket}/set/train", f"s3://{bucket}/set", to)
    with pytest.raises(UsageError, match=mentioning("not empty prepared.json")):
        prepare(source, f"s3://{bucket}", to)
    prepare(f"s3://{bucket}/set", tmp_path / "back", "parquet")
    assert samples(train_and_val(f"{tmp_path}/back")[0]) == samples(train_and_val(str(source))[0])


def test_an_image_that_ends_a_process_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a death, the images of a shard are tried one by one; it is written if none of them ends a process."""
    ends = True

    def in_this_process(
        copy: Any, samples: int, _workers: int, _name: str, take: Any, killed: Any, at_once: int
    ) -> None:
        for first in range(0, samples, at_once):
            for id in range(first, min(first + at_once, samples)):
                take(killed(id, "it ended") if id == 3 and ends else copy(range(id, id + 1)))

    target = tmp_path / "target"
    monkeypatch.setattr("raydali.commands.split_copies.in_processes", in_this_process)
    with pytest.raises(DataError, match=mentioning(f"{LabeledFiles.scan(f'{source}/train').path(3)} it ended empty")):
        prepare(source / "train", target, "tar", shard_size=1)
    (first,) = target.glob("*.tar")
    ends, written = False, first.stat().st_mtime_ns
    prepare(source / "train", target, "tar", shard_size=1)
    assert first.stat().st_mtime_ns == written and len([*target.glob("*.tar")]) == 4
    assert samples(labeled_images(str(target))) == samples(LabeledFiles.scan(f"{source}/train"))
