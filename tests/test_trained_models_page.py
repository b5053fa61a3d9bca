"""The page docs/trained-models.md, followed word by word by a user with a trained run."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import imagenet
from tests.support.cluster import ROOT, environment
from tests.support.pictures import photograph
from tests.support.trained_runs import made_run

PAGE = (ROOT / "docs/trained-models.md").read_text()
CLASSES = ["global", "local", "nominal"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What the page begins with: pictures, and a run that was trained on them."""
    home = tmp_path / "home"
    for name, amount in (("pictures", 12), ("other-pictures", 4)):
        for kind in CLASSES:
            (home / name / kind).mkdir(parents=True)
            for number in range(amount):
                photograph(size=(64, 48 + number)).save(home / name / kind / f"{number}.jpg")
    (home / "new-pictures/sub").mkdir(parents=True)
    for number in range(5):
        photograph(size=(64, 48 + number)).save(home / "new-pictures/sub" / f"{number}.jpg")
    (home / "new-pictures/5.jpg").write_bytes(b"")
    config = replace(imagenet.DIGITS, data=str(home / "pictures"), val_fraction=0.3)
    made_run(home / "raydali-runs", imagenet, config, CLASSES, name="pictures")
    return home


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_evaluates_and_predicts(home: Path) -> None:
    env = environment(home, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    commands = [line.removeprefix("$ ") for line in "".join(blocks("console")).splitlines()]
    assert [command.split()[1] for command in commands] == ["evaluate", "evaluate", "predict"]
    outputs = []
    for command in commands:
        done = subprocess.run(command, shell=True, cwd=home, env=env, capture_output=True, text=True, timeout=300)
        wanted = 1 if "predict" in command else 0  # one of the pictures is broken
        assert done.returncode == wanted, (command, done.stdout, done.stderr)
        outputs.append(done.stdout)
    run = home / "raydali-runs/pictures"
    assert f"{run}/report.html" in outputs[0]
    for file in re.findall(r"^\| `(\S+)` \| (?:all figures|the 64|both)", PAGE, re.MULTILINE):
        assert (run / file).stat().st_size > 1000, file
    other = json.loads((home / "other.json").read_text())
    assert other["samples"] == 12 and [row["class"] for row in other["classes"]] == CLASSES
    assert json.loads((run / "evaluation.json").read_text()) == other

    with (home / "predictions.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert [row["path"] for row in rows] == [f"{home}/new-pictures/sub/{number}.jpg" for number in range(5)]
    assert [*rows[0]][:5] == ["path", "label", "probability", "label_2", "probability_2"]
    assert "5.jpg" in (home / "predictions.csv.broken.csv").read_text()

    (code,) = blocks("python")
    code += f"""
import torch
from raydali.inference.samples import unlabeled_samples
source, _ = unlabeled_samples(run, "{home}/new-pictures/sub")
probabilities = model(pipeline.sample(source, 0, 0)[0][None]).softmax(1)[0]
print(run.classes[probabilities.argmax()], probabilities.max().item())
"""
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    label, probability = done.stdout.split()
    assert label == rows[0]["label"] and float(probability) == pytest.approx(float(rows[0]["probability"]), abs=0.01)
