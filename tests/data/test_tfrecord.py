"""TFRecord files through DALI's reader: every record once, equal shares of steps, resumes at epoch starts alone."""

import os
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from raydali.data.classification import TrainImages, ValidationImages
from raydali.data.labeled_images import labeled_images, train_and_val
from raydali.data.tfrecord import TFRecords
from raydali.data.tfrecord_loader import TFRecordLoader
from raydali.errors import DataError, UsageError
from tests.data.pictures import encoded

TRAIN = TrainImages(image_size=8, seed=3)
VALIDATION = ValidationImages(image_size=8, resize_size=8)
Write = Callable[..., TFRecords]


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def record(image: bytes, label: int | None) -> bytes:
    """tf.train.Example as protobuf, in a record of which DALI does not check the checksums."""
    values = {b"image/encoded": field(1, field(1, image))}
    if label is not None:
        values[b"image/class/label"] = field(3, field(1, varint(label)))
    data = field(1, b"".join(field(1, field(1, name) + field(2, value)) for name, value in values.items()))
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


def picture(label: int) -> bytes:
    return encoded(Image.new("RGB", (12, 10), (label * 7, 100, 0)), "PNG")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/raydali/tfrecord"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Files of so many records each; the label of a record, and its picture's red, say which it is."""

    def written(*counts: int, first_label: int = 0) -> TFRecords:
        total = 0
        for i, count in enumerate(counts):
            labels = range(total, total + count)
            content = b"".join(record(picture(label), label + first_label) for label in labels)
            (tmp_path / f"train-{i:05}-of-{len(counts):05}").write_bytes(content)
            total += count
        return TFRecords.scan(f"{tmp_path}/train-*-of-{len(counts):05}")

    return written


def test_files_are_counted_and_indexed_once(write: Write, cache: Path, tmp_path: Path) -> None:
    records = write(5, 9, 0, 3)
    assert len(records) == 17 and records.counts.tolist() == [5, 9, 0, 3]
    offset = 0
    with open(records.paths[1], "rb") as file:
        for line in Path(records.index_paths[1]).read_text().splitlines():
            size = 16 + struct.unpack("<Q", file.read(8))[0]
            assert line.split() == [str(offset), str(size)]
            offset += size
            file.seek(offset)
    made = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    assert len(made) == 4
    again = TFRecords.scan(f"{tmp_path}/train-{{00000..00003}}-of-00004")
    assert again.fingerprint == records.fingerprint and again.index_paths == records.index_paths
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == made
    with open(records.paths[2], "wb") as file:
        file.write(record(b"", 1))
    changed = TFRecords.scan(f"{tmp_path}/train-*-of-00004")
    assert len(changed) == 18 and changed.fingerprint != records.fingerprint


def test_what_is_no_tfrecord_file(write: Write, cache: Path, tmp_path: Path) -> None:
    whole = Path(write(2).paths[0]).read_bytes()
    for content in (whole[:-1], whole[:5], b"no record" * 100, whole + b"rest"):
        path = tmp_path / "bad.tfrecord"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=r"bad\.tfrecord is no TFRecord file, .*, or cut off: record"):
            TFRecords.scan(str(path))
    with pytest.raises(UsageError, match=r"1 of the 1 files .*none\.tfrecord are missing"):
        TFRecords.scan(str(tmp_path / "none.tfrecord"))
    with pytest.raises(UsageError, match="copy them to a local folder"):
        TFRecords.scan("s3://bucket/a.tfrecord")
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="no records in the 1 files"):
        TFRecords.scan(str(path))


def test_a_cache_that_cannot_be_written_is_named(write: Write, cache: Path) -> None:
    cache.parent.parent.write_text("a file")
    with pytest.raises(UsageError, match=r"DALI needs an index .* cannot be written: .*; set XDG_CACHE_HOME"):
        write(2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_train_on_as_many_full_batches_of_different_records(world_size: int, write: Write) -> None:
    records = write(13, 4, 12)
    orders = []
    for epoch in range(2):
        seen: list[int] = []
        for rank in range(world_size):
            loader = TFRecordLoader(records, TRAIN, batch_size=4, rank=rank, world_size=world_size)
            batches = [*loader.epoch(epoch)]
            assert len(batches) == loader.batches == 29 // world_size // 4
            for batch in batches:
                assert batch["images"].shape == (4, 3, 8, 8)
                # Each image has its own label.
                assert batch["images"][:, 0, 0, 0].tolist() == (batch["labels"] * 7).tolist()
                seen += batch["labels"].tolist()
        assert max(Counter(seen).values()) == 1
        assert 29 - len(seen) == loader.unseen < world_size * 4
        orders.append(seen)
    assert orders[0] != orders[1] and sorted(orders[0]) != orders[0]
    assert [label for batch in loader.epoch(1) for label in batch["labels"].tolist()] == orders[1][-len(batches) * 4 :]


@pytest.mark.parametrize("world_size", [1, 2])
def test_validation_has_each_record_once(world_size: int, write: Write) -> None:
    records = write(2, 1, first_label=1)
    seen = []
    for rank in range(world_size):
        loader = TFRecordLoader(records, VALIDATION, batch_size=2, rank=rank, world_size=world_size, first_label=1)
        batches = [batch["labels"].tolist() for batch in loader.epoch(0)]
        assert len(batches) == loader.batches and loader.unseen == 0
        seen += [label for batch in batches for label in batch]
    assert seen == [0, 1, 2]


def test_a_run_goes_on_at_epoch_starts_alone(write: Write) -> None:
    records = write(9)
    loader = TFRecordLoader(records, TRAIN, batch_size=2, rank=0, world_size=2)
    states = [loader.state_dict() for _ in loader.epoch(5)]
    assert [(state["epoch"], state["batches"]) for state in states] == [(5, 1), (6, 0)]
    for world_size in (1, 2, 3):
        assert TFRecordLoader(records, TRAIN, batch_size=2, world_size=world_size).epoch_of(states[1]) == 6
    with pytest.raises(UsageError, match=r"lies 1 batches inside epoch 5, where .* cannot begin: go on from one"):
        loader.epoch_of(states[0])
    with pytest.raises(UsageError, match=r"cannot begin, and its shards were those of 2 workers, not 3: go on"):
        TFRecordLoader(records, TRAIN, batch_size=2, world_size=3).epoch_of(states[0])
    with pytest.raises(UsageError, match="the checkpoint's seed is 3, this run's is 4: give the earlier one"):
        TFRecordLoader(records, TrainImages(image_size=8, seed=4), batch_size=2).epoch_of(states[1])
    with pytest.raises(UsageError, match="the checkpoint's fingerprint is"):
        TFRecordLoader(write(8), TRAIN, batch_size=2).epoch_of(states[1])


def test_records_that_cannot_be_used(write: Write, tmp_path: Path) -> None:
    records = write(7)
    with pytest.raises(UsageError, match="7 records are fewer than a batch of 4 for each of 2 workers: lower"):
        TFRecordLoader(records, TRAIN, batch_size=4, world_size=2)
    with pytest.raises(UsageError, match="7 records are fewer than the 8 workers: lower --workers"):
        TFRecordLoader(records, VALIDATION, batch_size=1, world_size=8)
    with pytest.raises(UsageError, match=r"rank must lie in 0\.\.1, not 2"):
        TFRecordLoader(records, TRAIN, batch_size=1, rank=2, world_size=2)
    for content, message in (
        (record(picture(0), None), "has no 'image/class/label' of at least 0"),
        (record(b"no image", 1), "a record of rank 0 cannot be read"),
    ):
        (tmp_path / "bad.tfrecord").write_bytes(content)
        bad = TFRecords.scan(str(tmp_path / "bad.tfrecord"))
        with pytest.raises(DataError, match=message):
            next(iter(TFRecordLoader(bad, VALIDATION, batch_size=1).epoch(0)))
    with pytest.raises(DataError, match="has no 'image/class/label' of at least 1"):
        next(iter(TFRecordLoader(records, VALIDATION, batch_size=1, first_label=1).epoch(0)))


def test_jobs_refuse_them_with_the_reason(write: Write, tmp_path: Path) -> None:
    path = write(2).paths[0]
    os.rename(path, tmp_path / "a.tfrecord")
    for data in (str(tmp_path / "a.tfrecord"), "train-*-of-00010", "s3://bucket/train-{000..099}.tfrecords"):
        with pytest.raises(UsageError, match=r"names TFRecord files: DALI's reader gives no ids .*write tar shards"):
            labeled_images(data)
        with pytest.raises(UsageError, match="names TFRecord files"):
            train_and_val(data)
