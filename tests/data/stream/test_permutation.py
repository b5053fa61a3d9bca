"""Permutations, whole and in blocks: each id once, at any place as likely, at no cost, and always the same."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2, chi2_contingency, chisquare

from raydali.data.stream.permutation import WINDOW_BLOCKS, BlockPermutation, Permutation
from tests.support.clocks import least_cpu_seconds
from tests.support.messages import mentioning
from tests.support.quick import first_quick

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 10_000)
BILLION = 10**9
P_VALUE = 1e-4  # the keys are fixed, so a test that passes once passes always
MAX_GROWTH = 20
"""What 256 ids of a billion may cost, in costs of 256 ids of some thousands; cycle walking alone makes it 2."""


def cpu_seconds(permutation: Callable[[int], Permutation | BlockPermutation], size: int) -> float:
    """Of making one of that size and asking it for its last 256 ids."""
    return least_cpu_seconds(lambda: permutation(size)(np.arange(size - 256, size)), 30)


def test_a_table_holds_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    tabled = order(1000, 5, 3)
    monkeypatch.setattr("raydali.data.stream.permutation.TABLED", 999)
    assert order(1000, 5, 3).tolist() == tabled.tolist()


def order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return Permutation(size, seed, epoch)(np.arange(size))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_small_sizes_are_permuted(seed: int) -> None:
    for size in range(1, 301):
        assert sorted(order(size, seed, seed % 7).tolist()) == list(range(size)), f"size {size}"


@given(st.integers(1, 20_000), SEEDS, EPOCHS)
def test_sizes_are_permuted(size: int, seed: int, epoch: int) -> None:
    np.testing.assert_array_equal(np.sort(order(size, seed, epoch)), np.arange(size))


@given(st.integers(20_000, 2**62), SEEDS, EPOCHS, st.data())
def test_large_sizes_have_an_id_of_its_own_for_each_position(
    size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    drawn = data.draw(st.sets(st.integers(0, size - 1), max_size=50))
    positions = sorted(drawn | set(range(50)) | set(range(size - 50, size)) | set(range(size // 2, size // 2 + 50)))
    ids = Permutation(size, seed, epoch)(positions).tolist()
    assert len(set(ids)) == len(positions)
    assert min(ids) >= 0
    assert max(ids) < size


@given(st.integers(1, 1000), SEEDS, st.data())
def test_ids_do_not_depend_on_what_else_is_asked(size: int, seed: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, size - 1)))
    ids = Permutation(size, seed, 0)(np.array(positions, np.int64))
    assert ids.dtype == np.int64
    assert ids.tolist() == order(size, seed, 0)[np.array(positions, np.int64)].tolist()


def test_ids_have_the_shape_of_the_positions() -> None:
    ids = order(1000, 3, 4)
    permutation = Permutation(1000, 3, 4)
    np.testing.assert_array_equal(permutation(np.arange(1000).reshape(10, 5, 20)), ids.reshape(10, 5, 20))
    assert [permutation(position).item() for position in range(1000)] == ids.tolist()
    assert permutation(7).shape == ()


def test_the_order_stays_what_it_was() -> None:
    """A checkpoint of an older release must go on in the same order."""
    assert order(10, 0, 0).tolist() == [4, 3, 6, 8, 9, 7, 1, 5, 0, 2]
    assert Permutation(BILLION, 1, 2)(np.arange(4)).tolist() == [507341931, 919897616, 771653243, 748494720]


@pytest.mark.parametrize("size", [1000, 1024, 65_537])
def test_orders_differ_by_epoch_and_by_seed(size: int) -> None:
    keys = list(product([0, 1, 2, 2**63 - 1], range(4)))
    orders = np.stack([order(size, *key) for key in keys])
    for i in range(len(keys)):
        for j in range(i):
            # Fixed points of a random permutation: Poisson of mean 1, above 12 once in 10^10.
            assert (orders[i] == orders[j]).sum() <= 12, f"{keys[i]} and {keys[j]}"
            assert abs(np.corrcoef(orders[i], orders[j])[0, 1]) < 5 / np.sqrt(size)


@pytest.mark.parametrize("seeds", [12, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "size",
    # Of sizes up to 5, each order is as likely: see below.
    [7, 16, 33, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 3, 4, 5, 6, 8, 9, 12, 17, 31, 64, 100))],
)
def test_every_id_is_as_likely_at_every_position(size: int, seeds: int) -> None:
    """Chi-squared of position against id over keys.

    The sum of K random permutation matrices has (size - 1)^2 degrees of freedom, and its cells the variance
    K / size * (1 - 1 / size), hence the factor (size - 1) / size of the usual statistic.
    """
    keys = list(product(range(seeds), range(60)))
    counts = np.zeros((size, size))
    for key in keys:
        counts[np.arange(size), order(size, *key)] += 1
    expected = len(keys) / size
    statistic = ((counts - expected) ** 2 / expected).sum() * (size - 1) / size
    assert chi2.sf(statistic, (size - 1) ** 2) > P_VALUE


@pytest.mark.parametrize("seeds", [12, pytest.param(60, marks=pytest.mark.slow)])
@first_quick("size", [2, 3, 4, 5])
def test_every_order_of_few_samples_is_as_likely(size: int, seeds: int) -> None:
    found = Counter(tuple(order(size, *key).tolist()) for key in product(range(seeds), range(60)))
    assert chisquare([found[each] for each in permutations(range(size))]).pvalue > P_VALUE


@pytest.mark.parametrize("size", [10_007, 16_384, 16_385])
@pytest.mark.parametrize("distance", [1, 3, 128])
def test_neighbours_are_not_correlated(size: int, distance: int) -> None:
    """The serial test: the ids at two positions close to each other say nothing about each other."""
    for key in product(range(2), range(2)):
        ids = order(size, *key)
        here, there = ids[:-distance], ids[distance:]
        assert abs(np.corrcoef(here, there)[0, 1]) < 5 / np.sqrt(size)
        cells = np.histogram2d(here, there, bins=16, range=[(0, size), (0, size)])[0]
        assert chi2_contingency(cells).pvalue > P_VALUE
        parities = np.histogram2d(here % 4, there % 4, bins=4)[0]
        assert chi2_contingency(parities).pvalue > P_VALUE


def test_the_first_ids_of_a_billion_are_spread_evenly() -> None:
    for epoch in range(4):
        ids = Permutation(BILLION, 0, epoch)(np.arange(20_000))
        assert chisquare(np.histogram(ids, bins=100, range=(0, BILLION))[0]).pvalue > P_VALUE
        assert chisquare(np.bincount(ids % 128, minlength=128)).pvalue > P_VALUE


def test_a_billion_samples_cost_nothing() -> None:
    positions = np.arange(BILLION - 256, BILLION)
    few, many = (cpu_seconds(lambda size: Permutation(size, 0, 0), size) for size in (1000, BILLION))
    assert many < MAX_GROWTH * few

    tracemalloc.start()
    try:
        Permutation(BILLION, 0, 2)(positions)
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=mentioning(f"1 element {size}")):
        Permutation(size, 0, 0)


def block_order(size: int, block: int, seed: int, epoch: int, window: int = 0) -> NDArray[np.int64]:
    return BlockPermutation(size, block, seed, epoch, window)(np.arange(size))


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@first_quick("window", [3, 0])
@pytest.mark.parametrize(
    "block", [1, 3, 16, 301, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4, 7, 100))]
)
def test_small_sizes_are_permuted_in_blocks(block: int, window: int, step: int) -> None:
    for size in range(1, 301, 1 if block + window < 3 else step):
        assert sorted(block_order(size, block, 5, 2, window).tolist()) == list(range(size)), f"size {size}"


@given(st.integers(1, 5_000), st.integers(1, 3000), SEEDS, EPOCHS, st.integers(0, 3000))
def test_sizes_are_permuted_in_blocks(size: int, block: int, seed: int, epoch: int, window: int) -> None:
    np.testing.assert_array_equal(np.sort(block_order(size, block, seed, epoch, window)), np.arange(size))


@given(st.integers(1, 3000), st.integers(1, 60), SEEDS, st.integers(0, 100), st.data())
def test_ids_in_blocks_do_not_depend_on_what_else_is_asked(
    size: int, block: int, seed: int, window: int, data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1))), np.int64)
    ids = BlockPermutation(size, block, seed, 0, window)(positions)
    assert ids.dtype == np.int64
    assert ids.tolist() == block_order(size, block, seed, 0, window)[positions].tolist()


@pytest.mark.parametrize("size", [100_000, 100_037])
def test_a_window_holds_few_blocks(size: int) -> None:
    block = 100
    for window in block_order(size, block, 1, 2)[: size - size % block].reshape(-1, block)[:320].reshape(-1, 1600):
        # One of them may be cut in two by the short block.
        assert len(np.unique(window // block)) in (WINDOW_BLOCKS, WINDOW_BLOCKS + 1)
        assert abs(np.corrcoef(window, np.arange(1600))[0, 1]) < 5 / 40
        assert len(np.unique(window[:160] // block)) > 8


@pytest.mark.parametrize("size", [102_400, 102_437])
def test_a_window_of_blocks_is_spread_over_the_data(size: int) -> None:
    """In every window of 64 blocks there is one of each 16 neighbouring blocks."""
    block = 100
    ids = block_order(size, block, 1, 2, 64)
    windows = ids[ids < 102_400].reshape(16, 6400)
    blocks = [np.unique(window // block) for window in windows]
    for found in blocks:
        assert (found // 16).tolist() == [*range(64)]
        assert abs(np.corrcoef(found // 16, found % 16)[0, 1]) < 5 / 8
    assert len({found.tobytes() for found in blocks}) == 16
    other = np.unique(block_order(size, block, 1, 3, 64)[:6400] // block)
    assert len(np.intersect1d(blocks[0], other)) < 20  # of 64: windows of another epoch are of other blocks


@pytest.mark.parametrize(
    ("size", "window"), [(60, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((64, 5), (77, 3)))]
)
def test_ids_are_uniform_over_the_positions_of_spread_blocks(size: int, window: int) -> None:
    keys = list(product(range(20), range(20)))
    positions = np.mean([np.argsort(block_order(size, 4, *key, window)) for key in keys], 0)
    assert abs(positions - (size - 1) / 2).max() < 5 * size / np.sqrt(12 * len(keys))


@pytest.mark.parametrize("window", [0, 8])
def test_orders_of_blocks_differ_by_epoch_and_by_seed(window: int) -> None:
    orders = np.stack([block_order(5000, 64, *key, window) for key in product([0, 1, 2**63 - 1], range(3))])
    for i in range(len(orders)):
        for j in range(i):
            assert (orders[i] == orders[j]).sum() <= 60


def test_the_short_block_comes_anywhere() -> None:
    places = [int(np.flatnonzero(block_order(35, 1 + 9, 0, epoch) >= 30).mean()) for epoch in range(200)]
    assert 12 < np.mean(places) < 22


@pytest.mark.parametrize(("block", "window"), [(5000, 0), (10_000, 0), (8, 5000), (8, 625), (5000, 1)])
def test_a_block_or_a_window_of_everything_mixes_everything(block: int, window: int) -> None:
    assert abs(np.corrcoef(block_order(5000, block, 0, 0, window), np.arange(5000))[0, 1]) < 5 / np.sqrt(5000)


@pytest.mark.parametrize("window", [0, 64])
def test_a_billion_samples_in_blocks_cost_nothing(window: int) -> None:
    sizes = 10_000, BILLION
    few, many = (cpu_seconds(lambda size: BlockPermutation(size, 1024, 0, 0, window), size) for size in sizes)
    assert many < MAX_GROWTH * few


def test_the_order_of_blocks_stays_what_it_was() -> None:
    """A checkpoint of an older release must go on in the same order."""
    assert block_order(10, 4, 0, 0).tolist() == [4, 0, 7, 8, 5, 1, 6, 2, 3, 9]
    assert BlockPermutation(BILLION, 1000, 1, 2)(np.arange(4)).tolist() == [636576136, 507481574, 234615515, 431127136]
    assert block_order(14, 2, 0, 0, 3).tolist() == [3, 10, 13, 12, 11, 2, 0, 8, 1, 9, 6, 5, 4, 7]
    spread = BlockPermutation(BILLION, 1000, 1, 2, 64)(np.arange(4))
    assert spread.tolist() == [432505761, 155211722, 608942035, 286038145]


@pytest.mark.parametrize(("size", "block"), [(0, 1), (1, 0), (5, -1)])
def test_blocks_below_one_are_refused(size: int, block: int) -> None:
    with pytest.raises(ValueError, match=f"blocks of 1, not {size} and {block}"):
        BlockPermutation(size, block, 0, 0)
