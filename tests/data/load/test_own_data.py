"""The Python of docs/own-data.md, as it stands there."""

import gzip
import os
import re
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
from tests.support.pictures import encoded, files, photograph

DOCUMENT = Path(__file__).parents[3] / "docs/own-data.md"
GREY = {"train": np.stack([np.asarray(photograph(size=(8, 6)).convert("L")) + i for i in range(12)])}
GREY["t10k"] = GREY["train"][::-2]
NUMBERS = {name: np.arange(len(images), dtype=np.uint8) % 3 for name, images in GREY.items()}


def write_idx(path: Path, array: NDArray[np.uint8]) -> None:
    header = bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(header + array.tobytes()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own-data")


@pytest.fixture(scope="module")
def example(folder: Path) -> dict[str, Any]:
    """Return the names that the document's Python defines, run on IDX files and on pairs of equal photographs."""
    (folder / "fashion-mnist").mkdir()
    for name in ("train", "t10k"):
        write_idx(folder / f"fashion-mnist/{name}-images-idx3-ubyte.gz", GREY[name])
        write_idx(folder / f"fashion-mnist/{name}-labels-idx1-ubyte.gz", NUMBERS[name])
    for kind in ("blurred", "sharp"):
        (folder / "photographs" / kind).mkdir(parents=True)
        for i in range(9):
            photograph(size=(100 + i, 90 - i)).save(folder / f"photographs/{kind}/{i}.png")
    # Each line at its place, since DALI reads the source of a graph with conditionals.
    parts = re.split(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    code = "\n".join(part if i % 2 else "\n" * part.count("\n") for i, part in enumerate(parts))
    left: dict[str, Any] = {}
    here = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(code, str(DOCUMENT), "exec"), left)
    finally:
        os.chdir(here)
    return left


def test_it_runs_as_it_stands(example: dict[str, Any]) -> None:
    inputs, targets = example["inputs"], example["targets"]
    assert (inputs.shape, inputs.dtype) == ((4, 3, 64, 64), torch.uint8)
    assert torch.equal(inputs, targets)


@pytest.mark.usefixtures("example", "tar_cache")
@pytest.mark.parametrize("loader", ["dali", "torch"])
def test_parquet_of_idx_files_has_their_pixels_and_labels(folder: Path, loader: LoaderName) -> None:
    whole = ValidationImages(image_size=6, resize_size=6)
    for name, source in zip(GREY, train_and_val(str(folder / "fashion-mnist")), strict=True):
        assert source.classes == ("0", "1", "2")
        with make_loader(loader, source, whole, OrderedPass(samples=len(source), batch_size=12)) as batches:
            (batch,) = batches
        expected = torch.from_numpy(GREY[name][:, None, :, 1:7].copy()).expand(-1, 3, -1, -1)
        assert torch.equal(batch["images"], expected)
        assert batch["labels"].tolist() == NUMBERS[name].tolist()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_what_inputs_draws_is_the_same_on_any_rank(
    example: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files(tmp_path, **{f"{i}": encoded(photograph(size=(60, 50))) for i in range(48)})
    stream = Stream(samples=48, epochs=1, batch_size=6, global_batch_size=12, seed=0)
    pipeline = example["RandAugmented"](image_size=32, seed=0)
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
