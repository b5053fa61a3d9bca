"""Weights matched with models: the same tensors and outputs as with torchvision's and timm's own loading."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import torchvision
from torch import nn

from raydali.data.tasks.settings import IMAGENET_MEAN, IMAGENET_STD
from raydali.errors import UsageError
from raydali.training.models.classification import build_model
from raydali.training.models.detection import build_detector
from raydali.training.models.normalized import Normalized
from raydali.training.models.segmentation import build as build_segmenter
from raydali.training.weights.matching import MatchedWeights, match
from raydali.training.weights.preprocessing import Preprocessing, of_torchvision, published_by_torchvision
from raydali.training.weights.reading import Weights, read_weights
from tests.support.messages import mentioning, mentions
from tests.support.quick import first_quick

State = dict[str, torch.Tensor]
Build = Callable[[str, int], nn.Module]


def randomized(model: nn.Module) -> nn.Module:
    """The model in evaluation mode, with running statistics as after training."""
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    return model.eval()


def images(size: int) -> torch.Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def matched(file: Path | str, name: str, classes: int, size: int = 224, **options: Any) -> MatchedWeights:
    build = partial(build_model, name, image_size=size)
    return match(read_weights(str(file), name, size), build, classes, **options)


def loaded(weights: MatchedWeights, name: str, classes: int, size: int = 224) -> nn.Module:
    model = build_model(name, classes, size)
    weights.load(model)
    return model.eval()


def made(state: State, classes: tuple[str, ...] | None = None) -> Weights:
    return Weights("weights.pth", "0" * 64, state, Preprocessing(), classes)


# ---------------------------------------------------------------------------------------------------------------------
# Real weights


def test_real_weights_equal_torchvisions_own_load(mobilenet: Path) -> None:
    theirs = torchvision.models.mobilenet_v2()
    theirs.load_state_dict(torch.load(mobilenet, weights_only=True))
    theirs.eval()
    weights = matched(mobilenet, "mobilenet_v2", 1000)
    ours = loaded(weights, "mobilenet_v2", 1000)
    assert weights.skipped == weights.missing == weights.new_head == ()
    assert len(weights.loaded) == 314
    expected, state = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == state.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    with torch.no_grad():
        assert torch.equal(ours(images(224)), theirs(images(224)))


def test_only_the_head_is_new_for_other_classes(mobilenet: Path) -> None:
    weights = matched(mobilenet, "mobilenet_v2", 3)
    head = ("classifier.1.bias", "classifier.1.weight")
    assert weights.new_head == weights.skipped == head
    assert weights.missing == ()
    assert len(weights.loaded) == 312
    (line,) = weights.describe()
    assert mentions(line, "312 3 1,000 classifier.1.bias classifier.1.weight")
    model = build_model("mobilenet_v2", 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    weights.load(model)
    file = torch.load(mobilenet, weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] if name in head else file[name]), name


def test_weights_of_another_model_are_refused(mobilenet: Path, tmp_path: Path) -> None:
    torch.save(build_model("resnet18", 10).state_dict(), tmp_path / "resnet18.pth")
    with pytest.raises(UsageError, match=mentioning("resnet18.pth 0% 90% features.0.0.weight conv1.weight --model")):
        matched(tmp_path / "resnet18.pth", "mobilenet_v2", 10)
    with pytest.raises(UsageError, match=mentioning(f"{mobilenet.name} --model")):
        matched(mobilenet, "timm:mobilenetv2_100", 10)
    with pytest.raises(ValueError, match="features"):
        matched(mobilenet, "mobilenet_v2", 3).load(build_model("resnet18", 3))


# ---------------------------------------------------------------------------------------------------------------------
# Files as torchvision and timm have them, with random values


def as_published(name: str, state: State) -> State:
    """The state as torchvision's file has it: DenseNet's names are of an old version."""
    if name.startswith("densenet"):
        parts = ("norm1.", "norm2.", "conv1.", "conv2.")
        for part in parts:
            state = {key.replace(f".{part}", f".{part[:-2]}.{part[-2:]}"): value for key, value in state.items()}
        assert any("norm.1.weight" in key for key in state)
    return state


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        pytest.param("densenet121", 64, {}, marks=pytest.mark.slow),
        ("googlenet", 96, {"init_weights": False}),
        pytest.param("inception_v3", 96, {"init_weights": False}, marks=pytest.mark.slow),
        pytest.param("vit_b_16", 224, {}, marks=pytest.mark.slow),
        ("regnet_y_400mf", 64, {}),
        pytest.param("convnext_tiny", 64, {}, marks=pytest.mark.slow),
        pytest.param("swin_t", 64, {}, marks=pytest.mark.slow),
    ],
)
def test_torchvisions_files_give_its_outputs(name: str, size: int, options: dict[str, Any], tmp_path: Path) -> None:
    theirs = randomized(torchvision.models.get_model(name, num_classes=7, **options))
    torch.save(as_published(name, theirs.state_dict()), tmp_path / "weights.pth")
    weights = matched(tmp_path / "weights.pth", name, 7, size)
    assert weights.missing == weights.new_head == ()
    assert all(name.startswith(("AuxLogits.", "aux1.", "aux2.")) for name in weights.skipped)
    with torch.no_grad():
        assert torch.equal(loaded(weights, name, 7, size)(images(size)), theirs(images(size)))
    fewer = matched(tmp_path / "weights.pth", name, 3, size)
    assert fewer.earlier_classes == 7
    assert set(weights.loaded) - set(fewer.loaded) == set(fewer.new_head) != set()


@first_quick(
    ("name", "build", "classes"),
    [
        ("fasterrcnn_mobilenet_v3_large_320_fpn", build_detector, 90),
        ("lraspp_mobilenet_v3_large", build_segmenter, 21),
        ("deeplabv3_mobilenet_v3_large", build_segmenter, 21),
    ],
)
def test_detectors_and_segmenters_get_heads_for_other_classes(name: str, build: Build, classes: int) -> None:
    options = {"aux_loss": True} if name.startswith("deeplab") else {}
    theirs = torchvision.models.get_model(name, weights=None, weights_backbone=None, **options)
    weights = match(made(theirs.state_dict()), partial(build, name), 5)
    assert weights.earlier_classes == classes and not set(weights.missing) - set(weights.new_head)
    assert {*weights.state} == theirs.state_dict().keys() - {*weights.new_head}
    assert published_by_torchvision(name)


@pytest.mark.parametrize(
    ("classifier", "name", "build", "part"),
    [
        pytest.param("resnet50", "retinanet_resnet50_fpn", build_detector, "backbone.body.", marks=pytest.mark.slow),
        pytest.param("resnet50", "fcn_resnet50", build_segmenter, "backbone.", marks=pytest.mark.slow),
        ("mobilenet_v3_large", "lraspp_mobilenet_v3_large", build_segmenter, "backbone."),
    ],
)
def test_a_classifiers_weights_are_those_of_the_backbone(classifier: str, name: str, build: Build, part: str) -> None:
    theirs = torchvision.models.get_model(classifier).state_dict()
    weights = match(made(theirs), partial(build, name), 5)
    assert {*weights.loaded} == {key for key in build(name, 5).state_dict() if key.startswith(part)}
    assert {*weights.skipped} == {key for key in theirs if key.startswith(("fc.", "classifier."))}
    assert weights.skipped and weights.new_head


@pytest.mark.slow
def test_weights_of_a_deeper_backbone_are_refused() -> None:
    deeper = made(torchvision.models.resnet101().state_dict())
    with pytest.raises(UsageError, match=mentioning("0% of this model")):
        match(deeper, partial(build_segmenter, "fcn_resnet50"), 5)


@first_quick("name", ["googlenet", "inception_v3"])
def test_models_that_normalize_again(name: str) -> None:
    """Built with its weights, torchvision's model expects images as ImageNet's, and normalises them once more."""
    theirs = torchvision.models.get_model(name, num_classes=3, init_weights=False, transform_input=True).eval()
    weights = match(made(theirs.state_dict()), partial(build_model, name), 3)
    wanted = of_torchvision(name, torchvision.models.get_model_weights(name).DEFAULT)
    assert wanted.mean and wanted.std
    ours = Normalized(loaded(weights, name, 3), wanted.mean, wanted.std).eval()
    given = Normalized(theirs, IMAGENET_MEAN, IMAGENET_STD).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(255 * images(96)), given(255 * images(96)), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_vision_transformer_at_another_size(tmp_path: Path) -> None:
    theirs = torchvision.models.vit_b_16(num_classes=3).state_dict()
    torch.save(theirs, tmp_path / "weights.pth")
    weights = matched(tmp_path / "weights.pth", "vit_b_16", 3, 96)
    expected = torchvision.models.vision_transformer.interpolate_embeddings(96, 16, theirs)
    assert weights.skipped == weights.missing == ()
    assert all(torch.equal(value, expected[name]) for name, value in weights.state.items())
    assert weights.state["encoder.pos_embedding"].shape == (1, 37, 768)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("convnext_atto", "pth"),
        ("resnet10t", "safetensors"),
        pytest.param("vit_tiny_patch16_224", "safetensors", marks=pytest.mark.slow),
        ("test_efficientnet", "pth"),
    ],
)
def test_timms_files_give_its_outputs(name: str, ending: str, tmp_path: Path) -> None:
    theirs = randomized(timm.create_model(name, num_classes=7))
    file = tmp_path / f"weights.{ending}"
    if ending == "pth":
        torch.save({"state_dict": theirs.state_dict()}, file)
    else:
        safetensors.torch.save_model(theirs, str(file))
    weights = matched(file, f"timm:{name}", 7)
    assert weights.missing == weights.skipped == ()
    with torch.no_grad():
        assert torch.equal(loaded(weights, f"timm:{name}", 7)(images(224)), theirs(images(224)))


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", pytest.param("swin_tiny_patch4_window7_224", marks=pytest.mark.slow)],
)
def test_timm_adapts_its_own_models_to_the_size(name: str, tmp_path: Path) -> None:
    theirs = timm.create_model(name, num_classes=3)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    weights = matched(tmp_path / "weights.pth", f"timm:{name}", 3, 96)
    assert weights.missing == weights.skipped == ()
    overlay = {"file": str(tmp_path / "weights.pth"), "num_classes": 3}
    same = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=3, img_size=96).eval()
    with torch.no_grad():
        assert torch.equal(loaded(weights, f"timm:{name}", 3, 96)(images(96)), same(images(96)))


# ---------------------------------------------------------------------------------------------------------------------
# Names, heads and shares


def digits_state(classes: int = 3) -> State:
    return dict(build_model("digits", classes).state_dict())


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model.", "0."])
def test_first_parts_of_names_are_left_out(prefix: str) -> None:
    state, build = digits_state(), partial(build_model, "digits")
    inside = {prefix + name: value for name, value in state.items()}
    assert match(made(inside), build, 3).loaded == tuple(sorted(state))
    with_loss = match(made({**inside, "loss.weight": torch.ones(3)}), build, 3)
    assert with_loss.loaded == tuple(sorted(state))
    assert with_loss.skipped == ("loss.weight",)
    two = {f"student.{name}": value for name, value in state.items()} | {
        f"teacher.{name}": value for name, value in state.items()
    }
    with pytest.raises(UsageError, match=mentioning("student.0.weight 0%")):
        match(made(two), build, 3)


def test_the_head_of_a_run_is_loaded_for_its_own_classes_only() -> None:
    weights, build = made(digits_state(), ("a", "b", "c")), partial(build_model, "digits")
    assert match(weights, build, 3, ["a", "b", "c"]).new_head == ()
    for others in (["a", "c", "b"], ["a", "b", "d"]):
        new = match(weights, build, 3, others)
        assert new.new_head == new.skipped == ("11.bias", "11.weight")
        assert "instead" not in new.describe()[0]


def test_what_does_not_match_is_told_by_name() -> None:
    state = digits_state()
    state["extra.weight"] = torch.ones(3)
    state["0.weight"] = torch.ones(32, 1, 3, 3)
    for name in ("1.running_mean", "1.num_batches_tracked"):
        del state[name]
    weights = match(made(state), partial(build_model, "digits"), 3, new_layers="0")
    assert weights.skipped == ("0.weight", "extra.weight")
    assert weights.missing == ("1.running_mean",)
    assert mentions("\n".join(weights.describe()), "0.weight extra.weight 1.running_mean")


def test_nine_tenths_of_the_body_must_match() -> None:
    state, build = digits_state(), partial(build_model, "digits")
    body = sum(value.numel() for name, value in state.items() if not name.startswith("11."))
    assert state["3.weight"].numel() / body > 0.1 > state["0.weight"].numel() / body
    without = {name: value for name, value in state.items() if name != "3.weight"}
    with pytest.raises(UsageError, match=mentioning("weights.pth 80% 90% 3.weight --model")):
        match(made(without), build, 3)
    assert match(made(without), build, 3, new_layers="3").missing == ("3.weight",)


@pytest.mark.parametrize("has_another", [False, True])
def test_a_file_that_lacks_a_layer_is_refused(has_another: bool) -> None:
    state, build = digits_state(), partial(build_model, "digits")
    without = {name: value for name, value in state.items() if name != "0.weight"}
    if has_another:
        without["0.weight"] = state["0.weight"][:, :1]
    with pytest.raises(UsageError, match=mentioning("weights.pth '0' --model --new-layers")):
        match(made(without), build, 3)
    assert "0.weight" not in match(made(without), build, 3, new_layers=r"0\.").loaded
    with pytest.raises(UsageError, match=mentioning("--new-layers '('")):
        match(made(without), build, 3, new_layers="(")


@pytest.mark.parametrize("wrapped", ["_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "module."])
def test_wrappers_are_left_out_wherever_they_stand(wrapped: str) -> None:
    """Each layer of its own, as torch.compile of the layers of a model leaves it, and Lightning around that."""
    state, build = digits_state(), partial(build_model, "digits")
    inside = {f"model.{name.replace('.', f'.{wrapped}_orig_mod.', 1)}": value for name, value in state.items()}
    assert len([name for name in inside if wrapped in name]) == len(state)
    assert match(made(inside), build, 3).loaded == tuple(sorted(state))


def test_a_model_that_is_compiled_in_parts_takes_plain_weights() -> None:
    def build(classes: int) -> nn.Module:
        model = build_model("digits", classes)
        assert isinstance(model, nn.Sequential)
        layer: Any = torch.compile(model[0])
        model[0] = layer
        return model

    assert "0._orig_mod.weight" in match(made(digits_state()), build, 3).loaded


def test_weights_of_half_precision_are_loaded() -> None:
    state = {name: value.half() if value.is_floating_point() else value for name, value in digits_state().items()}
    model = loaded(match(made(state), partial(build_model, "digits"), 3), "digits", 3)
    assert all(value.dtype == torch.float32 for value in model.parameters())
    assert torch.equal(model.state_dict()["0.weight"], state["0.weight"].float())


def test_weights_that_are_not_finite_are_refused() -> None:
    state = digits_state()
    state["3.weight"][0, 0, 0, 0] = torch.nan
    with pytest.raises(UsageError, match=mentioning("weights.pth NaN 3.weight")):
        match(made(state), partial(build_model, "digits"), 3)
