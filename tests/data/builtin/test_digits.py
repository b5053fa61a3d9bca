"""The built-in digits: right images in the right folders, the same bytes each time, written whole or not at all."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raydali.data.builtin import digits
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.labeled import LabeledFiles, check_classes
from raydali.errors import UsageError
from tests.support.messages import mentioning


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return Path(digits_folder())


def test_split_is_whole_disjoint_and_stratified(folder: Path) -> None:
    train, val = (LabeledFiles.scan(str(folder / split)) for split in ("train", "val"))
    check_classes(train, val)
    assert train.classes == tuple("0123456789") and (len(train), len(val)) == (1437, 360)
    names = [Path(index.path(id)).name for index in (train, val) for id in range(len(index))]
    assert sorted(names) == [f"{id:04d}.jpg" for id in range(1797)]
    share = np.bincount(val.labels) / (np.bincount(val.labels) + np.bincount(train.labels))
    assert np.abs(share - 0.2).max() < 0.01


def test_the_package_holds_the_digits_of_scikit_learn() -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    expected = load_digits()
    _, val = train_test_split(np.arange(1797), test_size=360, stratify=expected.target, random_state=0)
    with np.load(Path(digits.__file__).with_name("digits.npz")) as packed:
        assert np.array_equal(packed["images"], expected.images)
        assert np.array_equal(packed["labels"], expected.target)
        assert np.flatnonzero(packed["is_val"]).tolist() == sorted(val)


def test_images_show_their_digit(folder: Path) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    for file in sorted(folder.glob("val/*/*.jpg")):
        assert int(file.parent.name) == source.target[int(file.stem)]
        image = Image.open(file)
        assert (image.size, image.mode, image.format) == ((32, 32), "L", "JPEG")
        small = np.asarray(image.resize((8, 8), Image.Resampling.BOX)).ravel()
        assert np.corrcoef(small, source.data[int(file.stem)])[0, 1] > 0.95


@pytest.mark.slow
def test_writers_at_once_get_one_copy_of_the_same_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write, all_written = digits._write, threading.Barrier(3, timeout=60)

    def write_and_wait(folder: Path) -> None:
        write(folder)
        all_written.wait()

    monkeypatch.setattr(digits, "_write", write_and_wait)
    with ThreadPoolExecutor(3) as pool:
        folders = {future.result() for future in [pool.submit(digits_folder) for _ in range(3)]}
    assert folders == {str(tmp_path / "raydali" / "digits-v1")}
    assert [path.name for path in (tmp_path / "raydali").iterdir()] == ["digits-v1"]
    files = [file.relative_to(folder) for file in folder.rglob("*.jpg")]
    assert len(files) == 1797
    assert all((tmp_path / "raydali/digits-v1" / file).read_bytes() == (folder / file).read_bytes() for file in files)


def test_written_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent.parent))
    monkeypatch.setattr(digits, "_write", lambda folder: pytest.fail("written again"))
    assert digits_folder() == str(folder)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fill_the_disk(folder: Path) -> None:
        (folder / "train").mkdir(parents=True)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(digits, "_write", fill_the_disk)
    with pytest.raises(UsageError, match=mentioning("XDG_CACHE_HOME")):
        digits_folder()
    assert not [*(tmp_path / "raydali").iterdir()]


def test_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=mentioning("XDG_CACHE_HOME")):
        digits_folder()


def test_default_cache_is_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(digits, "_write", lambda folder: folder.mkdir())
    assert digits_folder() == str(tmp_path / ".cache" / "raydali" / "digits-v1")
