"""Models by name: what can be built for a size is built, also of other packages; all else is refused in words."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from raydali.errors import UsageError
from raydali.training.models.classification import build_model, check_model, has_one_size, head_names
from tests.support.messages import mentioning
from tests.support.quick import first_quick


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("vit_b_16", 32, marks=pytest.mark.slow),
        ("vit_b_32", 64),
        ("swin_t", 32),
        ("regnet_y_400mf", 32),
        ("digits", 5),
    ],
)
def test_a_model_is_built_for_the_size_that_is_asked_for(name: str, size: int) -> None:
    check_model(name, size)
    with torch.device("meta") if name == "vit_b_32" else torch.device("cpu"), torch.no_grad():
        assert build_model(name, 3, size).eval()(torch.empty(2, 3, size, size)).shape == (2, 3)


@first_quick(
    ("name", "size", "fit"),
    [("vit_b_16", 40, 32), ("vit_h_14", 32, 28), ("maxvit_t", 64, 224), ("inception_v3", 32, 96)],
)
def test_a_refused_image_size_names_a_possible_one(name: str, size: int, fit: int) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--model {name} {size}x{size} --image-size {fit}")):
        check_model(name, size)
    check_model(name, fit)


def test_a_beginning_of_a_name_is_completed() -> None:
    with pytest.raises(UsageError, match=mentioning("vit vit_b_16 vit_b_32")):
        check_model("vit")


# ---------------------------------------------------------------------------------------------------------------------
# Models of other packages

NETS = """
import torch
from torch import nn

def build(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    )

def sized(num_classes, *, img_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * img_size**2, num_classes))

def reads_values(num_classes):
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 2)]
    return nn.Sequential(*map(nn.Dropout, rates), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, num_classes))

def maps(num_classes):
    return nn.Conv2d(3, num_classes, 1)

def fails(num_classes):
    raise KeyError("depth")

def none(num_classes):
    return None

number = 3
"""


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module that only this test can import."""
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "nets.py").write_text(NETS)
    (tmp_path / "pack" / "broken.py").write_text("import nowhere")
    (tmp_path / "pack" / "script.py").write_text("import sys\nsys.exit(2)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pack", raising=False)
    monkeypatch.delitem(sys.modules, "pack.nets", raising=False)
    return "pack.nets"


@first_quick(
    ("name", "size", "one_size", "head"),
    [
        ("timm:convnext_atto.d2_in1k", 64, False, "head.fc"),
        ("timm:vit_tiny_patch16_224", 64, True, "head"),
        ("timm:regnety_002", 32, False, "head.fc"),
        ("squeezenet1_1", 64, False, "classifier.1"),
        ("regnet_y_400mf", 32, False, "fc"),
        ("digits", 28, False, "11"),
    ],
)
def test_a_model_its_size_and_its_head(name: str, size: int, one_size: bool, head: str) -> None:
    check_model(name, size)
    build = partial(build_model, name, image_size=size)
    assert has_one_size(name) is one_size
    assert head_names(build, 3) == {f"{head}.weight", f"{head}.bias"}
    with torch.no_grad():
        assert build(3).eval()(torch.zeros(2, 3, size, size)).shape == (2, 3)


def test_a_model_with_two_heads() -> None:
    assert len(head_names(partial(build_model, "timm:deit_tiny_distilled_patch16_224"), 5)) == 4


def test_timm_names_are_checked() -> None:
    with pytest.raises(UsageError, match=mentioning("timm:convnex timm:convnext_atto")):
        check_model("timm:convnex")
    with pytest.raises(UsageError, match=mentioning("timm:resnet18.nothing a1_in1k")):
        check_model("timm:resnet18.nothing")
    with pytest.raises(UsageError, match=mentioning("timm:xcit_nano_12_p16_224 100x100 --image-size")):
        check_model("timm:xcit_nano_12_p16_224", 100)


def test_a_missing_timm_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydali.extras.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=mentioning("pip install timm")):
        check_model("timm:resnet18")


@pytest.mark.parametrize(("factory", "size"), [("build", False), ("sized", True), ("reads_values", False)])
def test_a_factory_makes_the_model(nets: str, factory: str, size: bool) -> None:
    name = f"{nets}:{factory}"
    check_model(name, 24)
    assert has_one_size(name) is size
    build = partial(build_model, name, image_size=24)
    assert build(3).eval()(torch.zeros(2, 3, 24, 24)).shape == (2, 3)
    assert {name.rpartition(".")[2] for name in head_names(build, 3)} == {"weight", "bias"}


@pytest.mark.usefixtures("nets")
@pytest.mark.parametrize(
    ("name", "mentioned"),
    [
        ("pack.nets:nothing", "pack.nets nothing"),
        ("pack.nets:number", "int"),
        ("pack.nets:none", "NoneType torch.nn.Module"),
        ("pack.nets:fails", "KeyError depth"),
        ("pack.nets:maps", "(2, 2, 32, 32)"),
        ("pack.broken:build", "pack.broken ModuleNotFoundError nowhere PYTHONPATH"),
        ("pack.script:build", "pack.script SystemExit PYTHONPATH"),
        ("pack/nets.py:build", "package.module:build"),
        ("torchvision.models:vit_b_16", "32x32 --image-size 224"),
    ],
)
def test_a_factory_that_cannot_be_used(name: str, mentioned: str) -> None:
    with pytest.raises(UsageError, match=mentioning(f"--model {name} {mentioned}")) as error:
        check_model(name, 32)
    assert len(str(error.value)) <= 160 and "\n" not in str(error.value)
