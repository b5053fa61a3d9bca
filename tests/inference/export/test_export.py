"""`raydali export`: one file with everything from 8-bit pixels to probabilities, or one line and no file."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as F

from jobs import detection, imagenet, restoration, segmentation
from raydali import extras
from raydali.commands import export
from raydali.commands.export import Export
from raydali.data.tasks.crops import resize_and_crop
from raydali.data.tasks.pipeline import Interpolation
from raydali.errors import CommandError, DataError, UsageError
from raydali.inference.export.exported_model import CentreCrop
from raydali.inference.export.formats import FORMATS
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT
from tests.support.messages import mentioning
from tests.support.pictures import photograph
from tests.support.trained_runs import made_run

CLASSES = [*map(str, range(10))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def run(runs: Path) -> RunFolder:
    """A run on the digits, whose images are resized."""
    config = replace(imagenet.DIGITS, image_size=30, resize_size=36, interpolation="bicubic")
    return made_run(runs, imagenet, config, CLASSES, name="digits")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder, in which nothing is left after a failure."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not [*tmp_path.glob("*partial*")]


def options(run: RunFolder, to: Any = "onnx", **given: Any) -> Export:
    return Export(run=str(run), to=to, **{"images": 20, "no_gpu": True, "json": "proof.json", **given})


def test_an_onnx_file_has_everything_inside(run: RunFolder, here: Path) -> None:
    export.main(options(run))
    result = json.loads((here / "proof.json").read_text())
    proof = result["proof"]
    assert (proof["images"], proof["same"], proof["close"], proof["different"]) == (20, 20, 0, 0)
    assert proof["batch_sizes"] == [1, 2, 4, 8] and result["evaluate"] == {"same": 20, "answers": 20}
    assert result["bytes"] == (here / "digits.onnx").stat().st_size

    run_file = FORMATS["onnx"].opened((here / "digits.onnx").read_bytes())
    for shape in ((1, 3, 32, 32), (5, 3, 61, 40), (2, 3, 17, 200)):
        probabilities, logits = run_file(np.zeros(shape, np.uint8))
        assert probabilities.shape == logits.shape == (shape[0], 10)
        assert np.allclose(probabilities.sum(1), 1)

    (example,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/export.md").read_text(), re.DOTALL | re.MULTILINE)
    photograph().save(here / "photo.jpg")
    (here / "digits.onnx").rename(here / "pets.onnx")
    said = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"\d 0\.\d+\n", said)

    import onnx

    facts = {each.key: each.value for each in onnx.load(here / "pets.onnx").metadata_props}
    assert json.loads(facts["classes"]) == CLASSES and facts["run"] == str(run) and len(facts["weights_sha256"]) == 64
    assert (facts["image_size"], facts["resize_size"], facts["interpolation"]) == ("30", "36", "bicubic")
    assert json.loads(facts["mean"]) == [0.485, 0.456, 0.406] and json.loads(facts["std"]) == [0.229, 0.224, 0.225]


def test_threads_of_onnxruntime_sleep_while_they_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    given = []
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda _, options, **__: given.append(options))
    FORMATS["onnx"].opened(b"")
    assert given[0].intra_op_num_threads == torch.get_num_threads()
    assert given[0].get_session_config_entry("session.intra_op.allow_spinning") == "0"


@pytest.mark.slow
def test_a_file_of_torch_export_is_loaded_by_torch_alone(run: RunFolder) -> None:
    export.main(options(run, "torch-export", output="model.pt2"))
    extra = {"raydali.json": ""}
    network: Any = torch.export.load("model.pt2", extra_files=extra).module()
    assert json.loads(extra["raydali.json"])["classes"] == CLASSES
    for shape in ((1, 3, 32, 32), (3, 3, 61, 40)):
        assert network(torch.zeros(shape, dtype=torch.uint8))[0].shape == (shape[0], 10)


def mirrored(opened: Any, content: bytes) -> Any:
    """A file that mirrors its images."""
    run = opened(content)

    return lambda images: run(np.ascontiguousarray(images[..., ::-1]))


def test_a_file_that_answers_otherwise_is_not_written(
    run: RunFolder, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    format = FORMATS["torch-export"]
    monkeypatch.setitem(FORMATS, "torch-export", format._replace(opened=partial(mirrored, format.opened)))
    with pytest.raises(CommandError, match=mentioning("digits.pt2 torch.export")):
        export.main(options(run, "torch-export"))
    assert [each.name for each in here.iterdir()] == ["proof.json"]
    assert json.loads((here / "proof.json").read_text())["evaluate"] is None


@pytest.mark.slow
def test_without_one_sound_image_the_first_is_named(run: RunFolder, here: Path) -> None:
    first, *_ = broken = [here / f"data/{name}/1.jpg" for name in CLASSES]
    for file in broken:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=mentioning(f"{first} verify")):
        export.main(Export(run=str(run), data=str(here / "data"), to="torch-export"))


def test_detectors_are_refused(runs: Path, here: Path) -> None:
    config = replace(detection.SHAPES, model="ssdlite320_mobilenet_v3_large")
    detector = made_run(runs, detection, config, ["disc"], name="shapes", first_label=1)
    with pytest.raises(UsageError, match=mentioning("exported detectors video")):
        export.main(options(detector))
    assert not [*here.iterdir()]


def test_a_file_that_exists_stays(run: RunFolder, here: Path) -> None:
    (here / "digits.onnx").write_text("mine")
    with pytest.raises(UsageError, match=mentioning("--output digits.onnx")):
        export.main(options(run))
    assert (here / "digits.onnx").read_text() == "mine"
    with pytest.raises(UsageError, match=mentioning("--output nowhere/model.onnx")):
        export.main(options(run, output="nowhere/model.onnx"))
    with pytest.raises(UsageError, match=mentioning("--images 0")):
        export.main(options(run, images=0))


def test_a_missing_package_is_named(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "onnxscript" else find_spec(name))
    with pytest.raises(UsageError, match=mentioning("onnxscript pip install onnx")):
        export.main(options(run))


class Undecided(nn.Module):
    """Its code depends on the values of a tensor."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        means = images.mean((2, 3))
        logits: torch.Tensor = self.head(means if means.sum() > 0 else -means)
        return logits


@pytest.mark.parametrize("to", ["onnx", "torch-export"])
def test_a_model_that_cannot_be_traced_is_told_in_a_line(to: str, runs: Path, here: Path) -> None:
    config = replace(imagenet.DIGITS, model=f"{__name__}:Undecided")
    undecided = made_run(runs, imagenet, config, CLASSES, name=f"undecided-{to}")
    with pytest.raises(CommandError, match=mentioning("data-dependent --to")) as told:
        export.main(options(undecided, to))
    assert len(str(told.value)) <= 160 and "\n" not in str(told.value)
    assert not [*here.iterdir()]


@pytest.mark.slow
def test_a_restoration_network_takes_images_of_any_size(runs: Path, here: Path) -> None:
    deblur = made_run(runs, restoration, restoration.BLURRED, [], name="deblur")
    export.main(options(deblur))
    proof = json.loads((here / "proof.json").read_text())["proof"]
    assert proof["different"] == 0 and proof["largest_difference"]["restored"] <= 1
    run_file = FORMATS["onnx"].opened((here / "deblur.onnx").read_bytes())
    for shape in ((1, 3, 33, 64), (2, 3, 50, 51)):
        (restored,) = run_file(np.full(shape, 7, np.uint8))
        assert restored.shape == shape and restored.dtype == np.uint8
    with pytest.raises(CommandError, match=mentioning("torch.export --to")):
        export.main(options(deblur, "torch-export"))
    assert not (here / "deblur.pt2").exists()


@pytest.mark.slow
def test_a_segmentation_network_takes_images_of_any_size(runs: Path, here: Path) -> None:
    names = ["background", "disc", "rectangle", "triangle"]
    export.main(options(made_run(runs, segmentation, segmentation.SHAPES, names, name="shapes"), images=8))
    proof = json.loads((here / "proof.json").read_text())["proof"]
    assert proof["images"] == 8 and proof["different"] == 0 and proof["largest_difference"]["scores"] < proof["limit"]
    run_file = FORMATS["onnx"].opened((here / "shapes.onnx").read_bytes())
    for height, width in ((33, 64), (50, 51)):
        (scores,) = run_file(np.full((1, 3, height, width), 7, np.uint8))
        assert scores.shape == (1, 4, height, width)


# Resizing as arithmetic


SIZES = [(64, 64), (65, 64), (63, 64), (97, 31), (300, 401), (480, 640), (1001, 333), (2, 3), (20, 300), (1, 5000)]
"""Height and width: larger and smaller than the crop, odd and even, much longer than wide, and a thin one."""


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_are_those_of_validation(height: int, width: int, interpolation: Interpolation) -> None:
    shorter, side = 64, 56
    image = photograph().convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    expected = resize_and_crop(np.array(image), shorter, side, interpolation)
    found = CentreCrop(shorter, side, interpolation)(F.pil_to_tensor(image)[None])
    assert found.shape == (1, 3, side, side) and found.dtype == torch.float32
    differences = np.abs(found[0].permute(1, 2, 0).numpy() - expected)
    assert (differences > 0).mean() < 0.01 and (differences > 1).mean() < 0.001 and differences.max() <= 2


def test_a_batch_is_cropped_as_its_images_are() -> None:
    images = torch.randint(0, 256, (3, 3, 50, 70), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    crop = CentreCrop(40, 32, "bicubic")
    assert torch.equal(crop(images), torch.cat([crop(image[None]) for image in images]))
    assert torch.equal(CentreCrop(50, 50, "bilinear")(images), images[..., 10:60].float()), "without resizing, exact"
