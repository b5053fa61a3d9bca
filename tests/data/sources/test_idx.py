"""IDX files: pixels and labels as written, both loaders against PNG folders, folders of splits, and wrong files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from raydali.data.loading.make import LoaderName, make_loader
from raydali.data.sources.exclusion import exclude
from raydali.data.sources.formats import labeled_images, train_and_val
from raydali.data.sources.idx import IdxImages
from raydali.data.sources.labeled import LabeledFiles
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.data.tasks.pillow import decoded
from raydali.errors import UsageError
from tests.support.idx_files import idx, pictures, write_idx
from tests.support.messages import mentioning

LABELS = np.repeat(np.arange(3, dtype=np.uint8), 4)


def test_images_and_labels_are_those_of_the_files(tmp_path: Path) -> None:
    pixels, labels = pictures(12), LABELS[::-1]
    source = IdxImages.scan(str(write_idx(tmp_path, "train", pixels, labels, ending=".gz")))
    assert source.classes == ("0", "1", "2")
    np.testing.assert_array_equal(source.labels, labels)
    for id in range(12):
        image = np.asarray(decoded(source.read(id)))
        np.testing.assert_array_equal(image, pixels[id][..., None].repeat(3, -1))
    moved = IdxImages.scan(str(write_idx(tmp_path / "raw", "train", pixels, labels)))
    assert moved.fingerprint == source.fingerprint != source.drop([3]).fingerprint
    assert source.relocate("/elsewhere").path(5) == "/elsewhere/train-images-idx3-ubyte.gz#5"
    listed = tmp_path / "broken.txt"
    listed.write_text("train-images-idx3-ubyte.gz#3\n")
    (left,) = exclude(str(listed), source)
    assert [left.path(id).partition("#")[2] for id in (2, 3)] == ["2", "4"]
    np.testing.assert_array_equal(left.labels, np.delete(labels, 3))


@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_loaders_read_the_same_pixels_as_from_png_folders(tmp_path: Path, loader: LoaderName) -> None:
    pixels = pictures(12)
    images = IdxImages.scan(str(write_idx(tmp_path, "train", pixels, LABELS)))
    for id in range(12):
        (tmp_path / f"png/{LABELS[id]}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[id]).save(tmp_path / f"png/{LABELS[id]}/{id:02}.png")
    folder = LabeledFiles.scan(str(tmp_path / "png"))
    train = Stream(samples=12, epochs=2, batch_size=4, global_batch_size=4, seed=1), TrainImages(image_size=8, seed=1)
    for order, pipeline in (train, (OrderedPass(samples=12, batch_size=5), ValidationImages(image_size=8))):
        with (
            make_loader(loader, images, pipeline, order) as one,
            make_loader(loader, folder, pipeline, order) as other,
        ):
            for batch, expected in zip(one, other, strict=True):
                assert torch.equal(batch["images"], expected["images"])
                assert torch.equal(batch["labels"], expected["labels"])


@pytest.mark.parametrize("names", [("train", "t10k"), ("emnist-letters-train", "emnist-letters-test")])
def test_a_folder_has_both_splits(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, count in zip(names, (12, 7), strict=True):
        write_idx(tmp_path, name, pictures(count), LABELS[:count], ending=".gz")
    train, val = train_and_val(str(tmp_path))
    assert (len(train), len(val), val.classes) == (12, 7, ("0", "1", "2"))
    with pytest.raises(UsageError, match=mentioning(f"{names[0]}-images-idx3-ubyte.gz")):
        labeled_images(str(tmp_path))


def test_a_folder_of_several_sets_is_ambiguous(tmp_path: Path) -> None:
    for name in ("letters-train", "letters-test", "digits-train", "digits-test"):
        write_idx(tmp_path, name, pictures(12), LABELS)
    with pytest.raises(UsageError, match=mentioning("IDX --data images-idx3-ubyte --val-data --val-fraction 0.1")):
        train_and_val(str(tmp_path))


def test_the_other_labels_must_occur_in_training(tmp_path: Path) -> None:
    train = write_idx(tmp_path, "train", pictures(12), LABELS)
    val = write_idx(tmp_path, "t10k", pictures(12), LABELS + 1)
    with pytest.raises(UsageError, match=mentioning("'3' training set")):
        train_and_val(str(train), str(val))


def test_wrong_files_are_refused_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_idx(tmp_path, "train", pictures(12), LABELS, ending=".gz")
    labels = tmp_path / "train-labels-idx1-ubyte.gz"

    def refused(file: Path, content: bytes | None, *values: str) -> None:
        before = file.read_bytes()
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(UsageError, match=mentioning(" ".join([file.name, *values]))) as error:
            IdxImages.scan(str(path))
        assert len(str(error.value).replace(str(tmp_path), "")) <= 160
        file.write_bytes(before)

    whole = idx(pictures(12))
    refused(path, idx(LABELS), "0x00000801", "0x00000803")
    refused(path, b"", "0x", "0x00000803")
    refused(path, whole[:-1], "1439", "1440")
    refused(path, whole + b"\0", "more", "1440")
    refused(path, path.read_bytes()[:200], "cut off")
    refused(path, idx(pictures(12)[:0]), "(0, 12, 10)")
    refused(path, whole[:4] + b"\xff" * 12, "4294967296")
    refused(labels, idx(LABELS[:11]), "11", "12")
    refused(labels, idx(pictures(12)), "0x00000803", "0x00000801")
    refused(labels, None, "does not exist")
    assert not caplog.records
    write_idx(tmp_path, "train", pictures(12), LABELS + 1, ending=".gz")
    assert IdxImages.scan(str(path)).classes == ("1", "2", "3")
    assert "'1', '2', '3'" in caplog.text
