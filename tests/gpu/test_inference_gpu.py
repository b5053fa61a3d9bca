"""Trained models on a GPU: the same predictions as on the CPU, but for the rounding of decoders and of bf16."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jobs import detection, imagenet, restoration
from raydali.commands import evaluate, predict
from raydali.commands.evaluate import Evaluate
from raydali.commands.predict import Predict
from raydali.data.builtin.digits import digits_folder
from raydali.data.builtin.shapes import shapes_folder
from tests.support.pictures import photograph
from tests.support.trained_runs import made_run

pytestmark = pytest.mark.gpu
CLASSES = [*map(str, range(10))]


def rows(output: Path) -> list[dict[str, str]]:
    with output.open(newline="") as file:
        return [*csv.DictReader(file)]


def both(options: Predict, ending: str) -> list[Any]:
    outputs = [Path(f"{options.output}-{device}{ending}") for device in ("gpu", "cpu")]
    for output in outputs:
        predict.main(replace(options, output=str(output), gpu="gpu" in output.name, no_gpu="cpu" in output.name))
    return outputs


def test_labels_are_those_of_the_cpu(tmp_path: Path) -> None:
    run = made_run(tmp_path, imagenet, replace(imagenet.DIGITS, precision="fp32"), CLASSES)
    data = str(Path(digits_folder(), "val"))
    gpu, cpu = map(rows, both(Predict(run=str(run), data=data, output=str(tmp_path / "p")), ".csv"))
    assert [row["path"] for row in gpu] == [row["path"] for row in cpu]
    assert np.mean([one["label"] == other["label"] for one, other in zip(gpu, cpu, strict=True)]) > 0.97
    shares = [[float(row["probability"]) for row in each] for each in (gpu, cpu)]
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def test_evaluation_is_that_of_the_cpu(tmp_path: Path) -> None:
    run = made_run(tmp_path, imagenet, imagenet.DIGITS, CLASSES)
    found = []
    for gpu in (True, False):
        evaluate.main(Evaluate(run=str(run), gpu=gpu, no_gpu=not gpu))
        found.append(run.read_json("evaluation.json"))
    assert found[0]["samples"] == found[1]["samples"] == 360
    assert found[0]["metrics"]["loss"] == pytest.approx(found[1]["metrics"]["loss"], rel=0.02)


def test_boxes_are_those_of_the_cpu(tmp_path: Path) -> None:
    run = made_run(tmp_path, detection, detection.SHAPES, ["a", "b", "c"], first_label=1)
    options = Predict(run=str(run), data=str(Path(shapes_folder(), "val")), output=str(tmp_path / "boxes"))
    gpu, cpu = map(rows, both(options, ".csv"))
    assert len(gpu) == pytest.approx(len(cpu), rel=0.05) and len(cpu) > 100


def test_restored_images_are_those_of_the_cpu(tmp_path: Path) -> None:
    run = made_run(tmp_path, restoration, restoration.BLURRED, [])
    (tmp_path / "in").mkdir()
    for i, size in enumerate([(61, 40), (300, 200), (640, 427)]):
        photograph(size=size).save(tmp_path / f"in/{i}.png")
    gpu, cpu = both(Predict(run=str(run), data=str(tmp_path / "in"), output=str(tmp_path / "out")), "")
    for file in sorted(cpu.glob("*")):
        pixels = [np.asarray(Image.open(folder / file.name)).astype(int) for folder in (gpu, cpu)]
        assert pixels[0].shape == pixels[1].shape and np.abs(pixels[0] - pixels[1]).max() <= 1
