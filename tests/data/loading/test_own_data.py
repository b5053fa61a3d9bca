"""The Python of docs/own-data.md, as it stands there."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raydali.data.loading.make import make_loader
from raydali.data.stream.stream import Stream
from tests.support.pictures import encoded, files, photograph

DOCUMENT = Path(__file__).parents[3] / "docs/own-data.md"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names that the document's Python defines, run on pairs of equal photographs."""
    folder = tmp_path_factory.mktemp("own-data")
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_what_inputs_draws_is_the_same_on_any_rank(
    example: dict[str, Any], device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = files(tmp_path, **{f"{i}": encoded(photograph(size=(60, 50))) for i in range(48)})
    stream = Stream(samples=48, epochs=1, batch_size=6, global_batch_size=12, seed=0)
    pipeline = example["RandAugmented"](image_size=32, seed=0)
    monochrome = pipeline.inputs(source, np.arange(48), np.zeros(48, np.int64))[-1]

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
