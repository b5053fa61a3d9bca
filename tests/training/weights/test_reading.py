"""Weights by what is given for them: published, files and runs; and all that is none of them, in one line."""

import argparse
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn
from torchvision.models import MobileNet_V2_Weights, WeightsEnum

from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD
from raydali.errors import UsageError
from raydali.training.models.classification import build_model
from raydali.training.weights.preprocessing import Preprocessing, of_torchvision, published_by_torchvision
from raydali.training.weights.reading import read_weights
from tests.support.messages import mentioning
from tests.support.object_stores import PutObjects

STATE = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}
IMAGENET = Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 224, 256, "bilinear")


def saved(path: Path, value: object) -> str:
    torch.save(value, path)
    return str(path)


def assert_is_state(state: dict[str, torch.Tensor]) -> None:
    assert state.keys() == STATE.keys()
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)


def refused(given: object, mentioned: str, model: str = "mobilenet_v2") -> None:
    with pytest.raises(UsageError, match=mentioning(mentioned)) as error:
        read_weights(str(given), model)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"state_dict": state, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"state": {}}, "args": argparse.Namespace(lr=0.1)},
        lambda state: {"model": {"a.bias": torch.zeros(2)}, "model_ema": {**state, "n_averaged": torch.tensor(7)}},
        lambda state: {"net": state, "acc": 0.5},
        lambda state: {"model": {"state_dict": state}},
        lambda state: {"state": {"model": state, "optimizer": {"state": {}}}, "stream": {"seed": 0}},
    ],
)
def test_a_state_dict_is_found_in_a_checkpoint(wrap: Callable[[Any], Any], tmp_path: Path) -> None:
    assert_is_state(read_weights(saved(tmp_path / "weights.pth", wrap(STATE)), "digits").state)


def test_a_safetensors_file(tmp_path: Path) -> None:
    safetensors.torch.save_file(STATE, tmp_path / "weights.safetensors")
    weights = read_weights(str(tmp_path / "weights.safetensors"), "digits")
    assert_is_state(weights.state)
    assert weights.preprocessing == Preprocessing()


def test_the_hash_of_a_published_file_tells_its_preprocessing(mobilenet: Path, tmp_path: Path) -> None:
    renamed = shutil.copy(mobilenet, tmp_path / "weights.pth")
    weights = read_weights(str(renamed), "mobilenet_v2")
    assert weights.sha256.startswith("b0353104")
    assert weights.preprocessing == IMAGENET
    other = read_weights(saved(tmp_path / "other.pth", STATE), "mobilenet_v2")
    assert other.preprocessing == Preprocessing(IMAGENET_MEAN, IMAGENET_STD)


@pytest.mark.parametrize("model", ["digits", "tiny", "fcos_resnet50_fpn", "mypackage.nets:build"])
def test_nothing_is_known_of_a_file_for_another_model(model: str, tmp_path: Path) -> None:
    assert read_weights(saved(tmp_path / "weights.pth", STATE), model).preprocessing == Preprocessing()


@pytest.mark.parametrize("model", torchvision.models.list_models(torchvision.models.video))
def test_weights_for_videos_tell_mean_and_deviation_only(model: str, tmp_path: Path) -> None:
    first, *_ = published = published_by_torchvision(model)
    for each in published:
        expected = each.transforms()
        assert of_torchvision(model, each) == Preprocessing(tuple(expected.mean), tuple(expected.std))
    file = saved(tmp_path / "weights.pth", STATE)
    assert read_weights(file, model).preprocessing == of_torchvision(model, first)


def test_timm_tells_the_preprocessing_of_its_models(tmp_path: Path) -> None:
    file = saved(tmp_path / "weights.pth", STATE)
    convnext = read_weights(file, "timm:convnext_atto.d2_in1k").preprocessing
    assert convnext == Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 224, 256, "bicubic")
    assert read_weights(file, "timm:vit_tiny_patch16_224").preprocessing.mean == (0.5, 0.5, 0.5)


# ---------------------------------------------------------------------------------------------------------------------
# Published weights


def test_published_weights_are_taken_from_the_cache(
    mobilenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    cache = tmp_path / "hub" / "checkpoints"
    cache.mkdir(parents=True)
    shutil.copy(mobilenet, cache / "mobilenet_v2-7ebf99e0.pth")
    refused("default", "mobilenet_v2-7ebf99e0.pth b0353104")  # the default is the second version

    class EarlierWeights(WeightsEnum):  # type: ignore[misc]
        IMAGENET1K_V1 = MobileNet_V2_Weights.IMAGENET1K_V1.value
        DEFAULT = IMAGENET1K_V1

    monkeypatch.setattr("torchvision.models.get_model_weights", lambda _: EarlierWeights)
    shutil.copy(mobilenet, cache / mobilenet.name)
    weights = read_weights("default", "mobilenet_v2")
    assert len(weights.state) == 314
    assert weights.preprocessing == IMAGENET


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request._opener", None)  # it keeps the proxies of its first use
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        for each in (name, name.lower()):
            monkeypatch.setenv(each, "http://127.0.0.1:9")  # nobody listens there


@pytest.mark.parametrize(
    ("model", "mentioned"),
    [
        ("resnet18", "https://download.pytorch.org/models/resnet18-f37072fd.pth hub/checkpoints --weights"),
        ("timm:resnet18", "https://huggingface.co/timm/resnet18.a1_in1k --weights"),
        ("timm:resnet18.tv_in1k", "https://huggingface.co/timm/resnet18.tv_in1k --weights"),
    ],
)
def test_without_a_network_the_file_is_named(
    model: str, mentioned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_network(monkeypatch)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused("default", mentioned, model)
    assert not list(tmp_path.rglob("*.pth*"))


@pytest.mark.parametrize("model", ["digits", "tiny", "mypackage.nets:build", "timm:cspresnet50d"])
def test_a_model_without_published_weights(model: str) -> None:
    refused("default", f"--model {model} FILE", model)


def test_timms_weights_are_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folders are those of Hugging Face's client; its hub is not reachable."""
    theirs = timm.create_model("resnet10t")
    snapshot = tmp_path / "models--timm--resnet10t.c3_in1k" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (tmp_path / "models--timm--resnet10t.c3_in1k" / "refs").mkdir()
    (tmp_path / "models--timm--resnet10t.c3_in1k" / "refs" / "main").write_text("0" * 40)
    safetensors.torch.save_model(theirs, str(snapshot / "model.safetensors"))
    without_network(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    weights, again = (read_weights("default", "timm:resnet10t") for _ in range(2))
    expected = theirs.state_dict()
    assert weights.state.keys() == expected.keys()
    assert all(torch.equal(weights.state[name], expected[name]) for name in expected)
    assert weights.preprocessing == Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 176, 201, "bicubic")
    assert weights.sha256 == again.sha256 and len(weights.sha256) == 64


# ---------------------------------------------------------------------------------------------------------------------
# Runs


def make_run(folder: Path, state_file: str | None = "model.safetensors", facts: dict[str, Any] | None = None) -> str:
    (folder / "best").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    if facts is not None:
        (folder / "model.json").write_text(json.dumps(facts))
    if state_file == "model.safetensors":
        safetensors.torch.save_file(STATE, folder / "best" / state_file)
    elif state_file:
        torch.save({"model": STATE}, folder / "best" / state_file)
    return str(folder)


FACTS = {
    "model": "digits",
    "classes": ["cat", "dog"],
    "mean": [0.1, 0.2, 0.3],
    "std": [1, 2, 3],
    "image_size": 32,
    "resize_size": 36,
    "interpolation": "bicubic",
}


def test_a_run_tells_its_classes_and_preprocessing(tmp_path: Path) -> None:
    weights = read_weights(make_run(tmp_path / "run", facts=FACTS), "digits")
    assert_is_state(weights.state)
    assert weights.classes == ("cat", "dog")
    assert weights.preprocessing == Preprocessing((0.1, 0.2, 0.3), (1.0, 2.0, 3.0), 32, 36, "bicubic")


def test_what_is_no_finished_run(tmp_path: Path) -> None:
    refused(tmp_path, f"{tmp_path} config.json")
    refused(make_run(tmp_path / "young", None), "best/model.safetensors")
    refused(make_run(tmp_path / "broken", facts={"classes": None}), "model.json --weights best/model.safetensors")
    refused(tmp_path / "gone", "gone")
    refused("http://somewhere/weights.pth", "http://somewhere/weights.pth s3://BUCKET/FOLDER")


# ---------------------------------------------------------------------------------------------------------------------
# What is no file of weights


class Hostile:
    """An object whose pickle runs a command when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    hostile = {**STATE, "b": Hostile(f"touch {trace}")}
    refused(saved(tmp_path / "weights.pth", hostile), "weights.pth posix.system model.state_dict()")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(hostile))
    refused(tmp_path / "plain.pt", "plain.pt")
    refused(
        saved(tmp_path / "model.pt", nn.Sequential(nn.Linear(2, 2))),
        "torch.nn.modules.container.Sequential model.state_dict()",
    )
    assert not trace.exists()
    torch.load(tmp_path / "weights.pth", weights_only=False)
    assert trace.exists(), "the file would have run the command"


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
@pytest.mark.parametrize("kept", [0, 1, 7, 9, 100, 0.5, 0.9, 0.999])
def test_a_truncated_file(ending: str, kept: float, tmp_path: Path) -> None:
    state = build_model("digits", 3).state_dict()
    content = safetensors.torch.save(state)
    if ending == "pth":
        torch.save(state, tmp_path / "whole.pth")
        content = (tmp_path / "whole.pth").read_bytes()
    file = tmp_path / f"weights.{ending}"
    file.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    refused(file, f"weights.{ending}")


def test_a_truncated_file_of_old_torch(mobilenet: Path, tmp_path: Path) -> None:
    content = mobilenet.read_bytes()
    for kept in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "weights.pth").write_bytes(content[:kept])
        refused(tmp_path / "weights.pth", "weights.pth")


def test_what_holds_no_state_dict(tmp_path: Path) -> None:
    (tmp_path / "text.pth").write_text("These are no weights.\n" * 9)
    refused(tmp_path / "text.pth", "text.pth .safetensors")
    refused(saved(tmp_path / "list.pth", [1, 2]), "list.pth list")
    refused(saved(tmp_path / "mixed.pth", {"a": torch.ones(1), "b": 2}), "'a' 'b'")
    refused(saved(tmp_path / "two.pth", {"teacher": STATE, "student": STATE}), "'teacher' 'student'")
    refused(saved(tmp_path / "nothing.pth", {}), "nothing.pth")
    safetensors.torch.save_file({}, tmp_path / "nothing.safetensors")
    refused(tmp_path / "nothing.safetensors", "nothing.safetensors")


# ---------------------------------------------------------------------------------------------------------------------
# Object stores


def test_files_and_runs_in_an_object_store(s3: PutObjects) -> None:
    content = safetensors.torch.save(STATE)
    objects = {
        "weights.safetensors": content,
        "run/config.json": b"{}",
        "run/model.json": json.dumps(FACTS).encode(),
        "run/best/model.safetensors": content,
        "truncated.safetensors": content[:20],
    }
    s3("weights", objects)
    assert_is_state(read_weights("s3://weights/weights.safetensors", "digits").state)
    run = read_weights("s3://weights/run", "digits")
    assert_is_state(run.state)
    assert run.classes == ("cat", "dog")
    refused("s3://weights/gone.pth", "s3://weights/gone.pth")
    refused("s3://weights/truncated.safetensors", "s3://weights/truncated.safetensors")
    refused("s3://weights/run/best", "s3://weights/run/best config.json")
    refused("s3://key:secret@weights/gone.pth", "AWS_ACCESS_KEY_ID")
