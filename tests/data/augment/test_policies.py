"""Policies draw what torchvision's, timm's and DeiT's draw, from numbers that depend on (seed, epoch, id) only."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from timm.data import auto_augment as timm
from torchvision.transforms import AutoAugmentPolicy, v2

from raydali.data.augment.augmentation import Augmentation
from raydali.data.augment.operations import OPERATIONS, WIDTH, Kind, Rows
from raydali.errors import UsageError
from tests.support.messages import mentioning

SIDE = 224
COUNT = 20_000


def drawn(policy: str, count: int = COUNT, **options: Any) -> Rows:
    ids = np.arange(count)
    return Augmentation(policy, **options).draw(7, ids * 0, ids, SIDE)


def distinct(rows: Rows) -> set[tuple[float, ...]]:
    return {tuple(row) for row in np.unique(rows.reshape(-1, WIDTH).astype(np.float64).round(4), axis=0).tolist()}


def rows_of(name: str, magnitudes: list[float], signed: bool = False) -> Rows:
    values = np.array(magnitudes + [-each for each in magnitudes] * signed)
    return OPERATIONS[name](np.trunc(values.round(4)) if name.startswith("Translate") else values, SIDE)


def space(transform: Any, bins: int, levels: list[int]) -> set[tuple[float, ...]]:
    """Rows of all operations of a torchvision transform at these levels."""
    found = set[tuple[float, ...]]()
    for name, (magnitudes, signed) in transform.items():
        of_bins = magnitudes(bins, SIDE, SIDE)
        values = [0.0] if of_bins is None else [float(of_bins[level]) for level in levels]
        found |= distinct(rows_of(name, values, signed))
    return found


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("trivial", space(v2.TrivialAugmentWide._AUGMENTATION_SPACE, 31, [*range(31)])),
        ("rand:9,2", space(v2.RandAugment._AUGMENTATION_SPACE, 31, [9])),
        ("augmix", space(v2.AugMix._AUGMENTATION_SPACE, 10, [0, 1, 2]) | {(0.0,) * WIDTH}),
    ],
)
def test_operations_and_magnitudes_are_torchvisions(policy: str, expected: set[tuple[float, ...]]) -> None:
    assert distinct(drawn(policy)[:, :-1]) == expected


def test_operations_are_equally_frequent() -> None:
    kinds = drawn("trivial")[:, 0, 0]
    shares = np.bincount(kinds.astype(int), minlength=14)
    assert shares.sum() == COUNT
    for kind in (Kind.IDENTITY, Kind.BRIGHTNESS, Kind.EQUALIZE, Kind.SHARPNESS):
        assert abs(shares[kind] / COUNT - 1 / 14) < 0.01
    assert abs(shares[Kind.WARP] / COUNT - 5 / 14) < 0.02


def test_auto_has_the_lists_of_torchvision() -> None:
    policies = v2.AutoAugment(AutoAugmentPolicy.IMAGENET)._policies
    chances: dict[tuple[Any, ...], float] = {}
    for operations in policies:
        options = []
        for name, probability, level in operations:
            magnitudes, signed = v2.AutoAugment._AUGMENTATION_SPACE[name]
            values = [0.0] if level is None else [float(magnitudes(10, SIDE, SIDE)[level])]
            rows = sorted(distinct(rows_of(name, values, signed)))
            options.append([(row, probability / len(rows)) for row in rows] + [((0.0,) * WIDTH, 1 - probability)])
        for first, chance in options[0]:
            for second, other in options[1]:
                key = (first, second)
                chances[key] = chances.get(key, 0.0) + chance * other / len(policies)
    pairs = [tuple(map(tuple, pair)) for pair in drawn("auto")[:, :-1].astype(np.float64).round(4).tolist()]
    assert set(pairs) == {pair for pair, chance in chances.items() if chance}
    frequent = max(chances, key=lambda pair: chances[pair])
    assert abs(pairs.count(frequent) / COUNT - chances[frequent]) < 0.01


def test_timms_operations_are_timms() -> None:
    rows = drawn("rand-m7-inc1")[:, :-1]
    assert abs((rows[..., 0] == Kind.IDENTITY).mean() - 0.5) < 0.01
    rows_without_noise = distinct(rows) - {(0.0,) * WIDTH}
    expected = set[tuple[float, ...]]()
    names = {"TranslateXRel": "TranslateX", "TranslateYRel": "TranslateY"}
    for name in timm._RAND_INCREASING_TRANSFORMS:
        level: Any = timm.LEVEL_TO_ARG[name]
        values = {round(float(level(7, {})[0]), 6) for _ in range(40)} if level else {0.0}
        ours = names.get(name, name.removesuffix("Increasing"))
        scale = SIDE if "Rel" in name else 1 / 255 if ours == "Solarize" else 1
        offset = 1 if ours in ("Color", "Contrast", "Brightness", "Sharpness") else 0
        expected |= distinct(OPERATIONS[ours](np.array([scale * (value - offset) for value in values]), SIDE))
    assert {tuple(np.round(row, 2)) for row in rows_without_noise} == {tuple(np.round(row, 2)) for row in expected}
    noisy = drawn("rand-m7-mstd0.5-inc1")[:, 0]
    angles = np.degrees(np.arccos(noisy[noisy[:, 0] == Kind.WARP][:, 1].clip(-1, 1)))
    assert 0.3 < angles[angles > 1].std() < 3, "the magnitude has no noise"


def test_jitter_is_torchvisions() -> None:
    rows = drawn("jitter:0.4,0.1", 3000)[:, :-1]
    torch.manual_seed(0)
    theirs = [v2.ColorJitter(0.4, 0.4, 0.4, 0.1).make_params([]) for _ in range(3000)]
    for kind, name in ((Kind.BRIGHTNESS, "brightness_factor"), (Kind.HUE, "hue_factor")):
        factors = rows[rows[..., 0] == kind][:, 1]
        assert len(factors) == 3000
        assert ks_2samp(factors, [float(params[name]) for params in theirs]).pvalue > 1e-3
    assert len(np.unique(rows[..., 0], axis=0)) == math.factorial(4)


def test_three_is_grey_solarize_or_blur() -> None:
    rows = drawn("three")[:, :-1]
    grey, half = rows[:, 0, 0] == Kind.SATURATION, rows[:, 0, 0] == Kind.SOLARIZE
    blurred = rows[:, 0, 0] == Kind.BLUR_ROWS
    assert (grey | half | blurred).all()
    for each in (grey, half, blurred):
        assert abs(each.mean() - 1 / 3) < 0.02
    assert (rows[half][:, 0, 1] == 128).all()
    assert (rows[blurred][:, 1, 0] == Kind.BLUR_COLUMNS).all()
    assert (rows[blurred][:, 0, 1] == rows[blurred][:, 1, 1]).all()
    assert (rows[~blurred][:, 1] == 0).all()
    assert 0.1 <= rows[blurred][:, 0, 1].min() < 0.12 < 1.9 < rows[blurred][:, 0, 1].max() <= 2


def test_shift_is_a_random_crop_of_the_padded_image() -> None:
    moves = drawn("shift:2")[:, :2]
    pairs = {(x, y) for x, y in zip(moves[:, 0, 3].tolist(), moves[:, 1, 6].tolist(), strict=True)}
    assert pairs == {(x, y) for x in range(-2, 3) for y in range(-2, 3)}


def test_augmix_has_chains_of_one_to_three_and_weights_that_sum_to_one() -> None:
    plans = drawn("augmix")
    chains = plans[:, :-1].reshape(-1, 3, WIDTH)
    lengths = 1 + (chains[:, 1:, 0] != 0).sum(1)
    assert {length: round(float((lengths == length).mean()), 1) for length in (1, 2, 3)} == {1: 0.3, 2: 0.3, 3: 0.3}
    weights = plans[:, -1, 4:]
    np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
    torch.manual_seed(0)
    assert ks_2samp(weights[:, 0], torch.rand(COUNT).numpy()).pvalue > 1e-3
    shares = torch._sample_dirichlet(torch.ones(COUNT, 3)).numpy() * torch.rand(COUNT, 1).numpy()
    assert ks_2samp(weights[:, 2], shares[:, 0]).pvalue > 1e-3


def test_erased_rectangles_are_torchvisions() -> None:
    rectangles = drawn("none", 4000, erase=1.0)[:, -1, :4]
    torch.manual_seed(0)
    image, judge = torch.zeros(3, SIDE, SIDE), v2.RandomErasing(p=1.0)
    theirs = [judge.make_params([image]) for _ in range(4000)]
    for column, name in enumerate("ijhw"):
        assert ks_2samp(rectangles[:, column], [params[name] for params in theirs]).pvalue > 1e-3
    assert abs((drawn("none", 4000, erase=0.25)[:, -1, 2] > 0).mean() - 0.25) < 0.03


def test_a_plan_depends_on_seed_epoch_and_id_alone() -> None:
    augmentation = Augmentation("trivial+jitter:0.4", 0.5)
    ids, epochs = np.arange(64), np.arange(64) % 3
    whole = augmentation.draw(1, epochs, ids, SIDE)
    some = np.array([40, 3, 3, 17])
    np.testing.assert_array_equal(augmentation.draw(1, epochs[some], ids[some], SIDE), whole[some])
    for other in (augmentation.draw(2, epochs, ids, SIDE), augmentation.draw(1, epochs + 1, ids, SIDE)):
        assert (other != whole).any((1, 2)).mean() > 0.9


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ("trivail", "trivail trivial"),
        ("rand:9", "rand:9 rand:9,2"),
        ("rand:31,2", "rand:31,2 30"),
        ("rand:9.5,2", "rand:9.5,2"),
        ("jitter:x", "jitter:x"),
        ("jitter:0.4,0.6", "0.6 0.5"),
        ("grey:2", "grey:2 1"),
        ("trivial:3", "trivial:3"),
        ("rand-m7", "rand-m7 rand-m7-mstd0.5-inc1"),
        ("augmix+grey:0.1", "augmix alone"),
        ("nothing-like-it", "nothing-like-it trivial"),
    ],
)
def test_bad_policies_are_refused_by_name(policy: str, named: str) -> None:
    with pytest.raises(UsageError, match=mentioning(named)):
        Augmentation(policy)
