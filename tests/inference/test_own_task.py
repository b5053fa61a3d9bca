"""A task of the user's own, docs/examples/segmentation.py: it has all commands."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from raydali.commands import evaluate, export, predict
from raydali.commands.evaluate import Evaluate
from raydali.commands.export import Export
from raydali.commands.predict import Predict
from raydali.errors import UsageError
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT
from tests.support.copied_jobs import trained_copy
from tests.support.messages import mentioning
from tests.support.trained_runs import dealt_to

EXAMPLE = ROOT / "docs/examples/segmentation.py"
SIDE = 32


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bright rectangles on dark noise, and masks that say where they are."""
    root, random = tmp_path_factory.mktemp("rectangles"), np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 9)):
        for kind in ("images", "masks"):
            (root / split / kind).mkdir(parents=True)
        for number in range(count):
            image = random.integers(0, 90, (40, 36 + number, 3)).astype(np.uint8)
            mask = np.zeros(image.shape[:2], np.uint8)
            y, x = random.integers(4, 16, 2)
            image[y : y + 16, x : x + 14] += 120
            mask[y : y + 16, x : x + 14] = 1
            Image.fromarray(image).save(root / split / f"images/{number}.png")
            Image.fromarray(mask).save(root / split / f"masks/{number}.png")
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    options: dict[str, Any] = {"data": str(data), "side": SIDE, "batch_size": 8, "global_batch_size": 8, "epochs": 3}
    return trained_copy(
        EXAMPLE, tmp_path_factory.mktemp("runs"), **options, optimizer="adamw", learning_rate=0.003, precision="fp32"
    )


@pytest.mark.parametrize("workers", [1, 3])
def test_it_is_evaluated_as_the_run_measured(run: RunFolder, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    with dealt_to(workers):
        evaluate.main(Evaluate(run=str(run), job=str(EXAMPLE), checkpoint="newest", batch_size=2))
    found = run.read_json("evaluation.json")
    measured = run.rows("epochs.jsonl")[-1]["validation"]
    for name in ("images", "iou", "accuracy"):
        assert found["metrics"][name] == pytest.approx(measured[name], abs=1e-6)
    assert found["samples"] == 9 and "iou" in capsys.readouterr().out


def test_its_predictions_are_written(run: RunFolder, data: Path, tmp_path: Path) -> None:
    photographs = data / "val/images"
    predict.main(Predict(run=str(run), job=str(EXAMPLE), data=str(photographs), output=str(tmp_path / "masks")))
    files = sorted((tmp_path / "masks").glob("*.png"))
    assert [file.name for file in files] == sorted(f"{file.name}.png" for file in photographs.glob("*.png"))
    for file in files:
        with Image.open(file) as mask, Image.open(photographs / file.stem) as image:
            assert mask.size == image.size and {*np.unique(np.asarray(mask)).tolist()} <= {0, 1}
    with pytest.raises(UsageError, match=mentioning("p.csv folder")):
        predict.main(Predict(run=str(run), job=str(EXAMPLE), data=str(photographs), output=str(tmp_path / "p.csv")))
    assert [path.name for path in tmp_path.iterdir()] == ["masks"]


COLUMNS = """
def columns(config, scores, paths):
    return {"share": (scores.argmax(1) == 1).float().mean((1, 2)).tolist()}


JOB = Job("""


def test_predictions_may_be_columns(run: RunFolder, data: Path, tmp_path: Path) -> None:
    text = (
        EXAMPLE.read_text().replace("\nJOB = Job(", COLUMNS).replace("predictions=predictions", "predictions=columns")
    )
    (tmp_path / "my_job.py").write_text(text)
    arguments: dict[str, Any] = {"run": str(run), "data": str(data / "val/images"), "output": str(tmp_path / "p.csv")}
    predict.main(Predict(job=str(tmp_path / "my_job.py"), **arguments))
    head, *rows = (tmp_path / "p.csv").read_text().splitlines()
    assert head == '"path","share"' and len(rows) == 9
    assert all(0 <= float(row.rpartition(",")[2]) <= 1 for row in rows)
    (tmp_path / "my_job.py").write_text(text.replace("    predictions=columns,\n", ""))
    with pytest.raises(UsageError, match=mentioning("predictions(config, outputs, paths) docs/own-data.md")):
        predict.main(Predict(job=str(tmp_path / "my_job.py"), **arguments))


@pytest.mark.slow
def test_its_network_is_exported(run: RunFolder, tmp_path: Path) -> None:
    export.main(Export(run=str(run), job=str(EXAMPLE), output=str(tmp_path / "net.onnx"), images=4))
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for size in ((1, 3, SIDE, SIDE), (2, 3, 40, 56)):
        (scores,) = session.run(None, {"images": np.zeros(size, np.uint8)})
        assert scores.shape == (size[0], 2, *size[2:])
