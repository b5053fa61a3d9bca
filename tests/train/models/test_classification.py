"""Models by name and size of image: what torchvision can build for it is built, all else refused in words."""

import pytest
import torch

from raydali.errors import UsageError
from raydali.train.models.classification import build_model, check_model
from tests.support.messages import mentioning


@pytest.mark.parametrize(
    ("name", "size"), [("vit_b_16", 32), ("vit_b_32", 64), ("swin_t", 32), ("regnet_y_400mf", 32), ("digits", 5)]
)
def test_a_model_is_built_for_the_size_that_is_asked_for(name: str, size: int) -> None:
    check_model(name, size)
    with torch.device("meta") if name == "vit_b_32" else torch.device("cpu"), torch.no_grad():
        assert build_model(name, 3, size).eval()(torch.empty(2, 3, size, size)).shape == (2, 3)


@pytest.mark.parametrize(
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
