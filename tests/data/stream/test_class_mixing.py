"""Blocks of data that is sorted by class: how many are mixed, so that a global batch holds nearly all its classes."""

from dataclasses import replace

import numpy as np
import pytest

from raydali.data.stream.class_mixing import ClassMixing, fitting_window, is_useful, useful_block
from raydali.data.stream.stream import Stream

IMAGENET = np.sort(np.random.default_rng(0).integers(0, 1000, 1_281_167))
"""Labels of as many images, sorted by class."""


def stream_of(samples: int, global_batch_size: int, block: int) -> Stream:
    size = global_batch_size
    return Stream(samples=samples, epochs=2, batch_size=size // 8, global_batch_size=size, seed=3, shuffle_block=block)


@pytest.mark.parametrize(("global_batch_size", "in_full"), [(256, 226), (2048, 871)])
def test_imagenet_in_16_blocks_has_a_handful_of_classes(global_batch_size: int, in_full: int) -> None:
    mixing = ClassMixing.of(IMAGENET, stream_of(len(IMAGENET), global_batch_size, 1024))
    assert mixing.in_blocks < 40
    assert abs(mixing.in_full - in_full) < 6
    assert not mixing.is_enough


@pytest.mark.parametrize("global_batch_size", [256, pytest.param(2048, marks=pytest.mark.slow)])
@pytest.mark.parametrize("block", [64, *(pytest.param(block, marks=pytest.mark.slow) for block in (32, 1024))])
def test_the_window_is_as_small_as_gives_nearly_all_classes(block: int, global_batch_size: int) -> None:
    stream = stream_of(len(IMAGENET), global_batch_size, block)
    window = fitting_window(IMAGENET, stream)
    fitted = replace(stream, shuffle_window=window)
    assert ClassMixing.of(IMAGENET, fitted).is_enough
    assert not ClassMixing.of(IMAGENET, replace(stream, shuffle_window=window // 2)).is_enough
    assert is_useful(fitted) == (block < 1024)
    for step in (100, 300):  # all that a run does, not only where the window was looked for
        batch = np.concatenate([fitted.micro_batch(step, index).ids for index in range(8)])
        full = replace(fitted, shuffle_block=0)
        whole = np.concatenate([full.micro_batch(step, index).ids for index in range(8)])
        assert len(np.unique(IMAGENET[batch])) > 0.85 * len(np.unique(IMAGENET[whole]))


def test_what_is_mixed_already_needs_no_other_window() -> None:
    shuffled = np.random.default_rng(1).permutation(IMAGENET)
    assert fitting_window(shuffled, stream_of(len(shuffled), 2048, 1024)) == 0
    assert fitting_window(None, stream_of(len(shuffled), 2048, 1024)) == 0
    assert fitting_window(np.zeros(100, np.int64), stream_of(100, 16, 4)) == 0


def test_a_window_of_everything_is_the_last_resort() -> None:
    labels = np.repeat(np.arange(500), 10)
    stream = stream_of(5000, 256, 64)
    window = fitting_window(labels, stream)
    assert window * 64 >= 5000 and not is_useful(replace(stream, shuffle_window=window))


@pytest.mark.parametrize(
    ("labels", "block"),
    [
        (None, 1024),
        (np.random.default_rng(1).permutation(IMAGENET), 1024),
        pytest.param(IMAGENET, 64, marks=pytest.mark.slow),
        (np.repeat(np.arange(10), 5000), 256),
        (np.repeat(np.arange(500), 10), 0),
    ],
)
def test_the_largest_block_that_can_be_mixed_is_advised(labels: np.ndarray | None, block: int) -> None:
    samples = len(IMAGENET if labels is None else labels)
    assert useful_block(labels, stream_of(samples, 2048 if samples == len(IMAGENET) else 256, 0)) == block
