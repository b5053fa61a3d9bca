"""A task of the user's own, docs/examples/regression.py: it has all commands."""

import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from PIL import Image

from jobs import imagenet
from raydali.commands import evaluate, export, predict, preview
from raydali.commands.evaluate import Evaluate
from raydali.commands.export import Export
from raydali.commands.predict import Predict
from raydali.commands.preview import Preview
from raydali.data.builtin.digits import digits_folder
from raydali.errors import UsageError
from raydali.inference.samples import labeled_samples
from raydali.inference.trained_run import open_run
from raydali.run.folder import RunFolder
from tests.support.cluster import ROOT
from tests.support.copied_jobs import changed_copy, trained_copy
from tests.support.messages import mentioning
from tests.support.trained_runs import dealt_to, made_run

EXAMPLE = ROOT / "docs/examples/regression.py"
OPTIONS: dict[str, Any] = {"image_size": 32, "model": "digits", "batch_size": 8, "global_batch_size": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grey noise, and lists that say how bright it is, from 0.1 to 0.9."""
    root, random = tmp_path_factory.mktemp("grey"), np.random.default_rng(0)
    for split, count in (("train", 48), ("val", 9)):
        (root / split).mkdir()
        rows = ["path,brightness"]
        for number, brightness in enumerate(random.uniform(0.1, 0.9, count)):
            image = random.normal(255 * brightness, 9, (40, 36 + number, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(image).save(root / split / f"{number}.png")
            rows.append(f"{split}/{number}.png,{brightness:.4f}")
        (root / f"{split}.csv").write_text("\n".join(rows))
    return root


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    storage = tmp_path_factory.mktemp("runs")
    return trained_copy(EXAMPLE, storage, data=str(data), **OPTIONS, epochs=8, learning_rate=0.01, precision="fp32")


@pytest.mark.parametrize("workers", [1, 3])
def test_it_is_evaluated_as_the_run_measured(run: RunFolder, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    with dealt_to(workers):
        evaluate.main(Evaluate(run=str(run), job=str(EXAMPLE), checkpoint="newest", batch_size=2))
    found = run.read_json("evaluation.json")
    measured = run.rows("epochs.jsonl")[-1]["validation"]
    for name in ("images", "rmse", "r2"):
        assert found["metrics"][name] == pytest.approx(measured[name], abs=1e-6)
    assert found["samples"] == 9 and found["metrics"]["r2"] > 0.5 and "rmse" in capsys.readouterr().out


def test_its_predictions_are_written(run: RunFolder, data: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"run": str(run), "job": str(EXAMPLE), "data": str(data / "val.csv")}
    predict.main(Predict(**arguments, output=str(tmp_path / "p.csv")))
    with (tmp_path / "p.csv").open() as file, (data / "val.csv").open() as truth:
        predicted, true = [*csv.DictReader(file)], [*csv.DictReader(truth)]
    assert [row["path"] for row in predicted] == [str(data / row["path"]) for row in true]
    errors = [float(row["number"]) - float(other["brightness"]) for row, other in zip(predicted, true, strict=True)]
    best = max((row["validation"] for row in run.rows("epochs.jsonl")), key=lambda figures: figures["r2"])
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(best["rmse"], abs=1e-5)
    with pytest.raises(UsageError, match=mentioning("folder .csv")):
        predict.main(Predict(**arguments, output=str(tmp_path / "folder")))
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]


def test_a_job_without_predictions_says_what_to_add(run: RunFolder, data: Path, tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text(EXAMPLE.read_text().replace("    predictions=predictions,\n", ""))
    with pytest.raises(UsageError, match=mentioning("predictions(config, outputs, paths) docs/own-data.md")):
        predict.main(Predict(run=str(run), job=str(tmp_path / "my_job.py"), data=str(data), output="p.csv"))


def test_its_images_are_drawn(data: Path, tmp_path: Path) -> None:
    of_job = ("--data", str(data), "--image-size", "32", "--batch-size", "4")
    preview.main(Preview(job=str(EXAMPLE), of_job=of_job, device="cpu", output=str(tmp_path / "sheet.png")))
    assert (tmp_path / "sheet.png").exists()


def test_data_of_other_classes_are_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path, imagenet, imagenet.DIGITS, [*map(str, range(10))])
    for split in ("train", "val"):
        for name in "01":
            shutil.copytree(Path(digits_folder(), "val", name), tmp_path / "data" / split / name)
    job = changed_copy("imagenet", {'    task="classification",\n': ""}, tmp_path)
    with pytest.raises(UsageError, match=mentioning(f"{tmp_path}/data '2' None")):
        labeled_samples(open_run(str(run), job=str(job)), str(tmp_path / "data"))


@pytest.mark.slow
def test_its_network_is_exported(run: RunFolder, tmp_path: Path) -> None:
    export.main(Export(run=str(run), job=str(EXAMPLE), output=str(tmp_path / "net.onnx"), images=4))
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    for size in ((1, 3, 32, 32), (2, 3, 40, 56)):
        (numbers,) = session.run(None, {"images": np.zeros(size, np.uint8)})
        assert numbers.shape == (size[0], 1)
