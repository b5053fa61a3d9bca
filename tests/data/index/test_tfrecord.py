"""TFRecord files by name, their framing, images and labels of their records, and hostile files."""

import gzip
import io
import os
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboardX.record_writer import masked_crc32c as expected_crc32c

from raydali.data.index import tfrecord
from raydali.data.index.formats import labeled_images, train_and_val
from raydali.data.index.tfrecord import TFRecords, as_record, masked_crc32c, names_tfrecords, records
from raydali.data.read.file_parts import read_ahead
from raydali.errors import UsageError
from tests.support.messages import mentioning, mentions
from tests.support.tfrecords import Value, example, imagenet, record, tfrecords

pytestmark = pytest.mark.usefixtures("tar_cache")


def scan(path: Path, *records: bytes) -> TFRecords:
    path.write_bytes(b"".join(records))
    return TFRecords.scan(str(path))


def found(records: TFRecords) -> list[tuple[bytes, str]]:
    return [(records.read(id), records.classes[label]) for id, label in enumerate(records.labels.tolist())]


def field(number: int, data: bytes) -> bytes:
    """Of at most 127 bytes."""
    return bytes([number << 3 | 2, len(data)]) + data


def test_what_names_tfrecord_files(tmp_path: Path) -> None:
    for data in (
        *("train-*-of-*", "train-*-of-01024", "train-00000-of-01024", "train-{00000..00099}-of-01024", "d/t-of-1{0,1}"),
        *("a.tfrecord", "a.tfrecords", "a-*.tfrec", "imagenet-train.tfrecord-*-of-01024", "s3://b/{0..9}.tfrecord"),
    ):
        assert names_tfrecords(data), data
    (tmp_path / "a.tfrecord").mkdir()
    for data in ("train", "king-of-spain", "x-of-1.tar", "of-1/train.csv", "a.tar", f"{tmp_path}/a.tfrecord", ""):
        assert not names_tfrecords(data), data


def test_training_and_validation(tmp_path: Path) -> None:
    def write(name: str, labels: list[int]) -> None:
        (tmp_path / name).write_bytes(tfrecords((b"%d" % label, label) for label in labels))

    write("train-00000-of-00001", [3, 1, 2])
    write("validation-00000-of-00001", [2, 2])
    data, val_data = f"{tmp_path}/train-*-of-*", f"{tmp_path}/validation-*-of-*"
    train, val = train_and_val(data, val_data)
    assert isinstance(train, TFRecords) and train.classes == val.classes == ("1", "2", "3")
    assert train.labels.tolist() == [2, 0, 1] and val.labels.tolist() == [1, 1]
    with pytest.raises(UsageError, match=mentioning("--data -of-* --val-data")):
        train_and_val(data)
    with pytest.raises(UsageError, match=mentioning("--root /x")):
        train_and_val(data, val_data, "/x")
    write("validation-00000-of-00001", [0])
    with pytest.raises(UsageError, match=mentioning("labels training '0'")):
        train_and_val(data, val_data)


@pytest.mark.parametrize("data", [b"", b"\0" * 8, b"123456789", bytes(range(256))])
def test_checksums_are_those_of_tensorboardx(data: bytes) -> None:
    assert masked_crc32c(data) == expected_crc32c(data)


def test_records_come_out_as_they_went_in() -> None:
    items = [b"", b"one", b"x" * 1000]
    file = b"".join(map(as_record, items))
    read = io.BytesIO(file)

    def at(position: int, length: int) -> bytes:
        read.seek(position)
        return read.read(length)

    assert [file[begin:end] for begin, end in records(at, len(file))] == items


# ----------------------------------------------------------------------------------------------------------------------
# Records and Examples


def test_images_and_labels_of_imagenet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = [(b"%d" % i * 3000, i + 1) for i in range(12)]
    records = scan(tmp_path / "train-00000-of-00001", tfrecords(made))
    assert records.classes == tuple(map(str, range(1, 13))) and records.labels.tolist() == [*range(12)]
    assert found(records) == [(image, str(label)) for image, label in made]
    assert records.path(7) == f"{tmp_path}/train-00000-of-00001#7"
    assert caplog.text == ""


def test_features_of_tensorflow_datasets(tmp_path: Path) -> None:
    rows: list[dict[str, Value]] = [{"image": b"a", "label": 0, "file_name": b"x"}, {"image": b"b" * 9000, "label": 1}]
    assert found(scan(tmp_path / "a.tfrecord", *(record(example(row)) for row in rows))) == [
        (b"a", "0"),
        (b"b" * 9000, "1"),
    ]
    both: dict[str, Value] = {"image": b"other", "image/encoded": b"a", "label": 5, "image/class/label": 3}
    assert found(scan(tmp_path / "b.tfrecord", record(example(both)))) == [(b"a", "3")]


def test_labels_with_gaps_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = scan(tmp_path / "a.tfrecord", tfrecords([(b"", 10), (b"", 9), (b"", 10)]))
    assert records.labels.tolist() == [1, 0, 1] and records.classes == ("9", "10")
    assert mentions(caplog.text, "2 classes 9 10")


names = st.text(max_size=12) | st.sampled_from(["image/encoded2", "imag", "image/class/label\0", "x" * 200])
values = (
    st.lists(st.binary(max_size=300))
    | st.lists(st.integers(-(2**63), 2**63 - 1))
    | st.lists(st.floats(width=32, allow_nan=False))
)


@settings(max_examples=50)
@given(
    others=st.dictionaries(names.filter(lambda name: name not in ("image", "label")), values, max_size=8),
    image=st.binary() | st.binary(min_size=5000, max_size=9000),
    label=st.integers(0, 2**63 - 1),
    packed=st.booleans(),
)
@pytest.mark.slow
def test_what_protobuf_writes_is_read(
    others: dict[str, Value], image: bytes, label: int, packed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = example(others | {"image/encoded": image, "image/class/label": label}, packed=packed)
    path = tmp_path_factory.getbasetemp() / "any.tfrecord"
    path.write_bytes(record(b"") + record(data))
    read = read_ahead(str(path), path.stat().st_size)
    assert [*records(read, path.stat().st_size)] == [(12, 12), (28, 28 + len(data))]
    (begin, end), number = tfrecord._image_and_label(read, 28, 28 + len(data))
    assert path.read_bytes()[begin:end] == image and number == label


def test_unusual_encodings(tmp_path: Path) -> None:
    """What a parser of protobuf must take, though few writers write it so."""
    image, label = field(1, field(1, b"old")), field(3, b"\x08\x04")
    entries = [field(1, field(1, b"image/encoded") + field(2, image))]
    entries += [field(1, field(2, label) + field(1, b"image/class/label"))]  # the value before its name
    entries += [field(1, field(1, b"image/encoded") + field(2, field(1, field(1, b"new"))))]  # the last one counts
    unknown = b"\x78\x96\x01" + b"\x79" + bytes(8) + b"\x7d" + bytes(4) + field(14, b"unknown")
    data = unknown + field(1, unknown + entries[0] + entries[1]) + unknown + field(1, entries[2])
    assert found(scan(tmp_path / "a.tfrecord", record(data))) == [(b"new", "4")]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (example({"a": 1, "b": b"", "image": b""}), "label 'a' 'b' 'image'"),
        (example({"label": 1, "image_raw": b""}), "no image 'image_raw' 'label'"),
        (example({f"f{i}": 1 for i in range(12)}), "no image 'f0' 'f1' 4 more"),
        (example({}), "no image no features"),
        (b"", "no image no features"),
        (example({"image": [], "label": 1}), "0 values 'image'"),
        (example({"image": [b"a", b"b"], "label": 1}), "2 values 'image'"),
        (example({"image": b"", "label": [1, 2]}), "2 values 'label'"),
        (example({"image": b"", "label": [1, 2]}, packed=False), "2 values 'label'"),
        (example({"image": b"", "label": -1}), "-1 'label' int64 0"),
        (example({"image": b"", "label": b"cat"}), "bytes 'label' int64"),
        (example({"image": [0.5], "label": 1}), "float 'image' bytes"),
        (b"no Example at all", "tf.train.Example"),
        (example({"image": b"", "label": 1})[:-1], "tf.train.Example"),
        (b"\xff" * 30, "tf.train.Example"),
    ],
    ids=lambda value: value if isinstance(value, str) else "record",  # protobuf's bytes differ from process to process
)
def test_records_without_a_clear_sample(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"1 /a.tfrecord {message}")):
        scan(tmp_path / "a.tfrecord", imagenet(b"image", 1), record(data))


# ----------------------------------------------------------------------------------------------------------------------
# Hostile files


def test_broken_files_are_named(tmp_path: Path) -> None:
    one = imagenet(b"x" * 5000, 1)
    whole = one + imagenet(b"y" * 5000, 2)
    damaged = bytearray(whole)
    damaged[len(one) + 1] ^= 1
    (tmp_path / "0.tfrecord").write_bytes(whole)
    for content, message in {
        whole[:-1]: f"cut off record 1 {len(one)} {len(whole) - 1}",
        whole[: len(one) + 5]: f"cut off record 1 {len(one)} {len(one) + 5}",
        whole[:5]: "cut off record 0 5",
        bytes(damaged): f"damaged record 1 {len(one)}",
        whole + b"what follows": f"damaged record 2 {len(whole)}",
        b"no record" * 100: "TFRecord file",
        gzip.compress(whole): "compressed",
        zlib.compress(whole): "compressed",
    }.items():
        (tmp_path / "1.tfrecord").write_bytes(content)
        with pytest.raises(UsageError, match=mentioning(f"1 2 1.tfrecord {message}")):
            TFRecords.scan(f"{tmp_path}/*.tfrecord")


def test_empty_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "0.tfrecord").write_bytes(b"")
    with pytest.raises(UsageError, match=mentioning("images 1 shard records")):
        labeled_images(f"{tmp_path}/*.tfrecord")
    (tmp_path / "1.tfrecord").write_bytes(tfrecords([(b"a", 0)]))
    (tmp_path / "2.tfrecord").write_bytes(b"")
    records = TFRecords.scan(f"{tmp_path}/*.tfrecord")
    assert len(records) == 1 and records.path(0) == f"{tmp_path}/1.tfrecord#0"
    with pytest.raises(UsageError, match=mentioning("2 3 8.tfrecord 9.tfrecord")):
        TFRecords.scan(f"{tmp_path}/{{0,8,9}}.tfrecord")
    if os.getuid():
        (tmp_path / "0.tfrecord").chmod(0)
        with pytest.raises(UsageError, match=r"0\.tfrecord: .*Permission denied"):
            TFRecords.scan(f"{tmp_path}/*.tfrecord")


def test_images_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 records of 100 KB no more is read than some pages each."""
    read = 0
    pread = os.pread

    def counted(handle: int, length: int, offset: int) -> bytes:
        nonlocal read
        data = pread(handle, length, offset)
        read += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    path = tmp_path / "a.tfrecord"
    one = imagenet(bytes(100_000), 1)
    assert len(scan(path, one * 200)) == 200
    assert read <= 200 * 5 * 4096 < path.stat().st_size / 4
