"""The built-in pairs: blurred pieces of photographs and what they were, none of them in training and in test."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from raydali.data.builtin.blurred import BLURS, SIDE, blurred_folder
from raydali.data.index.image_pairs import ImagePairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return blurred_folder()


def test_inputs_are_blurred_and_targets_what_they_were(folder: str) -> None:
    train, test = (ImagePairs.scan(f"{folder}/{split}") for split in ("train", "test"))
    assert (len(train), len(test)) == (180, 45)
    for source in (train, test):
        for id in range(len(source)):
            images = [np.asarray(Image.open(files.path(id))).astype(float) for files in (source.inputs, source.targets)]
            assert [image.shape for image in images] == [(SIDE, SIDE, 3)] * 2
            blurred, sharp = images
            assert np.abs(np.diff(blurred, axis=1)).mean() < np.abs(np.diff(sharp, axis=1)).mean()
            assert np.abs(blurred.mean() - sharp.mean()) < 2
            assert 15 < 10 * np.log10(255**2 / ((blurred - sharp) ** 2).mean()) < 37


def test_no_piece_is_in_both_splits(folder: str) -> None:
    pieces = [
        {(file.parent.name.rpartition("-")[0], file.name) for file in Path(folder, split, "img").glob("*/*.png")}
        for split in ("train", "test")
    ]
    assert [len(BLURS) * len(part) for part in pieces] == [180, 45] and not pieces[0] & pieces[1]
