"""Windows of random crops: a scalar reference's to the number, torchvision's in distribution, one a sample."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2_contingency, ks_2samp
from torchvision import tv_tensors
from torchvision.transforms import v2

from raydali.data.stream.counter_rng import uniforms
from raydali.data.tasks.crops import ATTEMPTS, CROP_UNIFORMS, RandomCrops, Range
from tests.support.quick import first_quick

Shape = tuple[int, int]

AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)
SHAPES = [(375, 500), (500, 375), (224, 224), (1, 1), (1, 300), (300, 1), (30, 1000), (1000, 30), (7, 9)]
PROJECTIONS: dict[str, Callable[..., NDArray[Any]]] = {
    "top": lambda y, x, h, w: y,
    "left": lambda y, x, h, w: x,
    "bottom": lambda y, x, h, w: y + h,
    "right": lambda y, x, h, w: x + w,
    "height": lambda y, x, h, w: h,
    "width": lambda y, x, h, w: w,
    "area": lambda y, x, h, w: h * w,
    "aspect": lambda y, x, h, w: w / h,
}


def windows_of(
    shapes: NDArray[np.int64], uniforms: NDArray[np.float64], area: Range = AREA, aspect: Range = ASPECT
) -> NDArray[np.int64]:
    crops = RandomCrops(seed=0, random_area=area, random_aspect=aspect)
    return np.concatenate(crops.crop_windows(shapes, crops.draw_crops(uniforms)), 1)


def windows(shape: Shape, count: int, area: Range = AREA, aspect: Range = ASPECT) -> NDArray[np.int64]:
    numbers = uniforms(CROP_UNIFORMS, 0, 0, np.arange(count))
    return windows_of(np.tile(np.array(shape), (count, 1)), numbers, area, aspect)


def scalar_window(
    height: int, width: int, uniforms: list[float], area: Range, aspect: Range
) -> tuple[int, int, int, int]:
    """RandomResizedCrop.make_params of torchvision, step by step, with the numbers given."""
    numbers = iter(uniforms)
    found = None
    for _ in range(ATTEMPTS):
        share = area[0] + (area[1] - area[0]) * next(numbers)
        ratio = math.exp(math.log(aspect[0]) + (math.log(aspect[1]) - math.log(aspect[0])) * next(numbers))
        w = math.floor(math.sqrt(height * width * share * ratio) + 0.5)
        h = math.floor(math.sqrt(height * width * share / ratio) + 0.5)
        if found is None and 0 < w <= width and 0 < h <= height:
            found = h, w
    y, x = numbers
    if found:
        h, w = found
        return math.floor(y * (height - h + 1)), math.floor(x * (width - w + 1)), h, w
    if width / height < aspect[0]:
        h, w = round(width / aspect[0]), width
    elif width / height > aspect[1]:
        h, w = height, round(height * aspect[1])
    else:
        h, w = height, width
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize(("area", "aspect"), [(AREA, ASPECT), ((0.5, 0.5), (1.0, 1.0)), ((0.9, 1.0), (0.4, 3.0))])
def test_windows_equal_a_scalar_reference(area: Range, aspect: Range) -> None:
    shapes = np.array([*SHAPES, *np.random.default_rng(0).integers(1, 2000, (300, 2))] * 8)
    numbers = uniforms(CROP_UNIFORMS, 5, 1, np.arange(len(shapes)))
    rows = zip(shapes.tolist(), numbers.tolist(), strict=True)
    expected = [scalar_window(height, width, row, area, aspect) for (height, width), row in rows]
    np.testing.assert_array_equal(windows_of(shapes, numbers, area, aspect), expected)


def torchvision_windows(shape: Shape, count: int, area: Range, aspect: Range) -> NDArray[np.int64]:
    torch.manual_seed(0)
    peer = v2.RandomResizedCrop(8, scale=area, ratio=aspect)
    image = [tv_tensors.Image(torch.empty(3, *shape))]
    params = (peer.make_params(image) for _ in range(count))
    return np.array([[p["top"], p["left"], p["height"], p["width"]] for p in params])


# Fixed numbers, about 200 comparisons: the smallest p of as many true hypotheses is about 1/200.
@pytest.mark.parametrize(
    ("area", "aspect"), [(AREA, ASPECT), pytest.param((0.3, 0.9), (0.5, 3.0), marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("shape", [SHAPES[0], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[1:])])
def test_windows_have_torchvisions_distribution(shape: Shape, area: Range, aspect: Range) -> None:
    ours, theirs = windows(shape, 20_000, area, aspect), torchvision_windows(shape, 4000, area, aspect)
    for name, project in PROJECTIONS.items():
        assert ks_2samp(project(*ours.T), project(*theirs.T)).pvalue > 1e-3, name


@first_quick(("area", "aspect"), [(AREA, ASPECT), ((0.3, 0.9), (0.5, 3.0))])
@first_quick("shape", [(1, 9), (2, 3), (4, 4), (5, 3)])
def test_crops_of_tiny_images_are_distributed_as_torchvisions(shape: Shape, area: Range, aspect: Range) -> None:
    ours, theirs = windows(shape, 20_000, area, aspect), torchvision_windows(shape, 4000, area, aspect)
    _, cells = np.unique(np.concatenate([ours, theirs]), axis=0, return_inverse=True)
    table = np.stack([np.bincount(part, minlength=cells.max() + 1) for part in (cells[:20_000], cells[20_000:])])
    rare = table.sum(0) < 60
    table = np.concatenate([table[:, ~rare], table[:, rare].sum(1, keepdims=True)], 1)
    assert chi2_contingency(table[:, table.any(0)]).pvalue > 1e-3


def test_the_fallback_is_the_widest_centred_window() -> None:
    # The whole area in another shape never fits.
    assert np.unique(windows((30, 1000), 200, area=(1.0, 1.0)), axis=0).tolist() == [[0, 480, 30, 40]]
    assert np.unique(windows((1000, 30), 200, area=(1.0, 1.0)), axis=0).tolist() == [[480, 0, 40, 30]]
    assert np.unique(windows((100, 1), 200, area=(1.0, 1.0), aspect=(4.0, 5.0)), axis=0).tolist() == [[49, 0, 1, 1]]


def test_every_start_is_reached_and_none_beyond() -> None:
    ours = windows((5, 6), 4000, area=(0.2, 0.3))
    for axis, extent in ((0, 5), (1, 6)):
        for size in np.unique(ours[:, axis + 2]):
            starts = ours[ours[:, axis + 2] == size, axis]
            assert set(starts) == set(range(extent - size + 1))


def test_a_sample_has_one_window_whatever_its_batch() -> None:
    numbers = uniforms(CROP_UNIFORMS, 0, 0, np.arange(64))
    shapes = np.random.default_rng(1).integers(1, 900, (64, 2))
    together = windows_of(shapes, numbers)
    for i in (0, 17, 63):
        np.testing.assert_array_equal(windows_of(shapes[i : i + 1], numbers[i : i + 1])[0], together[i])


def test_areas_above_one_are_drawn_again_as_by_dali() -> None:
    from nvidia.dali import Pipeline, fn

    shape, area, count = (300, 400), (0.08, 1.25), 4000
    pipeline = Pipeline(batch_size=count, num_threads=1, device_id=None, seed=1)
    with pipeline:
        shapes = fn.external_source(lambda: [np.array(shape)] * count, batch=True)
        pipeline.set_outputs(*fn.random_crop_generator(shapes, random_area=area))
    pipeline.build()
    theirs = np.concatenate([part.as_array() for part in pipeline.run()], 1)
    ours = windows(shape, count, area)
    for name, project in PROJECTIONS.items():
        assert ks_2samp(project(*ours.T), project(*theirs.T)).pvalue > 1e-3, name
