"""Hashes and the uniforms drawn from them: spread evenly, independent of each other, and of the batch."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from raydali.data.stream.counter_rng import keyed, mix, uniforms

INTEGERS = st.integers(0, 2**63 - 1)


def test_mix_is_splitmix64() -> None:
    states = np.arange(1, 4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix(states).tolist() == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]  # its first three at seed 0


def test_every_bit_of_a_key_flips_half_of_the_hash() -> None:
    words = keyed(np.arange(1000))
    for bit in range(63):
        flipped = np.bitwise_count(words ^ keyed(np.arange(1000) ^ (1 << bit)))
        assert abs(flipped.mean() - 32) < 5 * 4 / np.sqrt(1000), f"bit {bit}"  # a binomial's deviation is 4


@given(st.lists(INTEGERS, min_size=1, max_size=5), st.data())
def test_each_part_of_a_key_counts(parts: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(parts) - 1))
    other = data.draw(INTEGERS.filter(lambda value: value != parts[place]))
    changed = [*parts[:place], other, *parts[place + 1 :]]
    assert keyed(*parts) != keyed(*changed)
    assert not np.isin(uniforms(8, *parts), uniforms(8, *changed)).any()


@given(INTEGERS, INTEGERS)
def test_the_order_of_parts_counts(first: int, second: int) -> None:
    assert (keyed(first, second) == keyed(second, first)) == (first == second)


@pytest.mark.parametrize("seed", range(3))
def test_uniforms_are_uniform(seed: int) -> None:
    numbers = uniforms(6, seed, 0, np.arange(20_000))
    assert numbers.shape == (20_000, 6)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    for column in numbers.T:
        assert kstest(column, "uniform").pvalue > 1e-4


def test_uniforms_never_reach_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydali.data.stream.counter_rng.keyed", lambda *_: np.array([0, 2**64 - 1], np.uint64))
    assert uniforms(2, 0).tolist() == [0, 1 - 2**-53]


def test_uniforms_of_different_keys_are_independent() -> None:
    ids = np.arange(20_000)
    columns = [column for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)] for column in uniforms(3, seed, epoch, ids).T]
    limit = 5 / np.sqrt(len(ids))
    for one, other in combinations(columns, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < limit
    for column in columns:
        assert abs(np.corrcoef(column[:-1], column[1:])[0, 1]) < limit  # neighbouring ids


@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=20),
    st.lists(st.integers(0, 5), min_size=20, max_size=20),
    st.integers(0, 2**63 - 1),
)
def test_uniforms_of_a_sample_do_not_depend_on_its_batch(ids: list[int], epochs: list[int], seed: int) -> None:
    epochs = epochs[: len(ids)]
    together = uniforms(4, seed, epochs, ids)
    alone = [uniforms(4, seed, epoch, sample) for epoch, sample in zip(epochs, ids, strict=True)]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(together[::-1], uniforms(4, seed, epochs[::-1], ids[::-1]))


@given(st.integers(1, 10), st.integers(1, 10))
def test_more_uniforms_begin_with_the_fewer(few: int, more: int) -> None:
    np.testing.assert_array_equal(uniforms(few + more, 1, 2, [3, 4])[:, :few], uniforms(few, 1, 2, [3, 4]))


def test_hashes_of_a_grid_of_keys_are_distinct() -> None:
    grid = keyed(np.arange(20)[:, None, None], np.arange(20)[:, None], np.arange(200))
    hashes = np.sort(grid, axis=None).tolist()
    assert len(hashes) == 20 * 20 * 200
    assert all(one < other for one, other in pairwise(hashes))
