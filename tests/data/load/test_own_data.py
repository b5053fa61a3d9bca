"""The examples that docs/own-data.md names: IDX files as Parquet, and DALI's own augmentations."""

import gzip
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from raydali.data.index.formats import train_and_val
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import ValidationImages
from raydali.data.tasks.pipeline import Samples
from tests.support.cluster import ROOT
from tests.support.pictures import encoded, files, photograph

EXAMPLES = ROOT / "docs/examples"
GREY = {"train": np.stack([np.asarray(photograph(size=(8, 6)).convert("L")) + i for i in range(12)])}
GREY["t10k"] = GREY["train"][::-2]
NUMBERS = {name: np.arange(len(images), dtype=np.uint8) % 3 for name, images in GREY.items()}


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.mark.usefixtures("tar_cache")
@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_parquet_of_idx_files_has_their_pixels_and_labels(tmp_path: Path, loader: LoaderName) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for name in GREY:
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", GREY[name])
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", NUMBERS[name])
    subprocess.run([sys.executable, EXAMPLES / "idx_to_parquet.py", folder], check=True)
    whole = ValidationImages(image_size=6, resize_size=6)
    for name, source in zip(GREY, train_and_val(str(folder)), strict=True):
        assert source.classes == ("0", "1", "2")
        with make_loader(loader, source, whole, OrderedPass(samples=len(source), batch_size=12)) as batches:
            (batch,) = batches
        expected = torch.from_numpy(GREY[name][:, None, :, 1:7].copy()).expand(-1, 3, -1, -1)
        assert torch.equal(batch["images"], expected)
        assert batch["labels"].tolist() == NUMBERS[name].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_what_inputs_draws_is_the_same_on_any_rank(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files(tmp_path, **{f"{i}": encoded(photograph(size=(60, 50))) for i in range(48)})
    stream = Stream(samples=48, epochs=1, batch_size=6, global_batch_size=12, seed=0)
    pipeline = runpy.run_path(str(EXAMPLES / "rand_augmented.py"))["RandAugmented"](image_size=32, seed=0)
    shapes = [np.full((48, 2), 50)]
    monochrome = pipeline.inputs(source, Samples(np.arange(48), np.zeros(48, np.int64), shapes))[-1]

    def grey() -> list[int]:
        found = []
        for rank in range(2):
            options: dict[str, Any] = {"rank": rank, "world_size": 2, "device": device}
            with make_loader("dali", source, pipeline, stream, **options) as loader:
                for batch in loader:
                    assert batch["images"].dtype == torch.uint8 and batch["images"].shape == (6, 3, 32, 32)
                    spread = batch["images"].float().std(1).amax((1, 2))
                    found += batch.ids[(spread < 5).cpu().numpy()].tolist()
        return sorted(found)

    assert grey()  # some of DALI's operations tint what is grey, and some take the colours of what is not
    monkeypatch.setattr("nvidia.dali.auto_aug.rand_augment.rand_augment", _unchanged)
    assert grey() == np.flatnonzero(monochrome).tolist() and 0 < monochrome.sum() < 48


def _unchanged(images: Any, **_: int) -> Any:
    return images
