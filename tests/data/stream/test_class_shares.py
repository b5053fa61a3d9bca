"""--class-sampling: exact shares of an epoch, whatever the number of ranks, and places of one id far apart."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from jobs.imagenet import DIGITS
from raydali.data.index.source import class_labels
from raydali.data.stream.class_shares import ClassSampling, ClassShares, SampledEpoch
from raydali.data.stream.stream import Stream
from raydali.errors import UsageError
from raydali.launch.driver.option_checks import check_class_sampling
from tests.support.messages import mentioning

UNIT = 1 << 20


def long_tailed(samples: int, classes: int, seed: int = 0) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    tail = rng.choice(classes, samples - classes, p=rng.dirichlet(np.full(classes, 0.5)))
    labels: NDArray[np.int64] = np.concatenate([np.arange(classes), tail]).astype(np.int64)
    return labels


def shares_of_ids(shares: ClassShares) -> NDArray[np.float64]:
    by_id = np.empty(len(shares.ids))
    by_id[shares.ids] = np.diff(shares.ends, prepend=0) / UNIT
    return by_id


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(60, 700),
    classes=st.integers(1, 12),
    batch=st.integers(1, 24),
    sampling=st.sampled_from(["balanced", "sqrt:0.3", "sqrt"]),
    seed=st.integers(0, 1000),
)
def test_each_id_has_the_floor_or_the_ceiling_of_its_share(
    samples: int, classes: int, batch: int, sampling: str, seed: int
) -> None:
    labels = long_tailed(samples, classes, seed)
    shares = ClassShares(labels, ClassSampling.parse(sampling), seed)
    assert shares.ends[-1] == samples * UNIT
    by_id, total = shares_of_ids(shares), np.zeros(samples)
    for epoch in range(8):
        order = SampledEpoch(shares, epoch, batch)
        ids, repeats = order(np.arange(samples))
        counts = np.bincount(ids, minlength=samples)
        assert (np.floor(by_id) <= counts).all() and (counts <= np.ceil(by_id)).all()
        assert len({*zip(ids.tolist(), repeats.tolist(), strict=True)}) == samples
        assert (repeats >= 0).all() and (repeats < counts[ids]).all()
        total += counts
        of_classes = np.bincount(labels, counts), np.bincount(labels, by_id)
        assert np.abs(of_classes[0] - of_classes[1]).max() < 1
        batches = np.resize(ids, (samples // batch, batch)).tolist()
        if samples >= (2 * batch + 2) * shares.most:
            assert all(len({*ids}) == batch for ids in batches)
        some = np.arange(0, samples, 7)
        assert [part.tolist() for part in order(some)] == [ids[some].tolist(), repeats[some].tolist()]
    assert np.abs(total / 8 - by_id).max() < 0.25


def test_balanced_classes_have_equal_places_and_sqrt_those_of_lvis() -> None:
    labels = np.repeat(np.arange(4), [700, 200, 90, 10])
    for option, factors in (("balanced", 1000 / np.array([700, 200, 90, 10])), ("sqrt:0.1", [1, 1, 1.0541, 3.1623])):
        shares = ClassShares(labels, ClassSampling.parse(option), 0)
        places = np.array(factors) * [700, 200, 90, 10]
        counted = sum(np.bincount(labels[SampledEpoch(shares, epoch, 10)(np.arange(1000))[0]]) for epoch in range(20))
        assert np.abs(np.asarray(counted) / 20 - 1000 * places / places.sum()).max() < 0.5


def test_equal_classes_are_an_ordinary_epoch() -> None:
    shares = ClassShares(np.tile(np.arange(5), 40), ClassSampling.parse("balanced"), 1)
    for epoch in range(5):
        ids, repeats = SampledEpoch(shares, epoch, 16)(np.arange(200))
        assert sorted(ids) == [*range(200)] and not repeats.any()


def test_any_number_of_ranks_from_any_step_has_the_same_global_batches() -> None:
    shares = ClassShares(long_tailed(300, 5), ClassSampling.parse("balanced"), 4)
    stream = Stream(samples=300, epochs=3, batch_size=4, global_batch_size=24, seed=4, class_shares=shares)

    def batches(ranks: int, start: int = 0) -> Counter[tuple[int, int, int]]:
        return Counter(
            (micro_batch.step, id, key)
            for rank in range(ranks)
            for micro_batch in stream.micro_batches(rank, ranks, start=start)
            for id, key in micro_batch.keys
        )

    alone = batches(1)
    assert max(alone.values()) == 1 and alone == batches(2) == batches(3)
    resumed = batches(3, start=17)
    assert resumed == Counter({row: count for row, count in alone.items() if row[0] >= 17})
    other = replace(stream, batch_size=2, order_batch_size=4)
    assert [*stream.micro_batch(5, 1).ids] == [*other.micro_batch(5, 2).ids, *other.micro_batch(5, 3).ids]


@pytest.mark.parametrize("option", ["balance", "sqrt:", "sqrt:0", "sqrt:2", "sqrt:x", "balanced:1", ""])
def test_what_it_must_be(option: str) -> None:
    with pytest.raises(UsageError, match=mentioning("--class-sampling balanced sqrt:SHARE")):
        ClassSampling.parse(option)


@pytest.mark.parametrize(
    ("others", "words"), [({"repeats": 2}, "--repeats 2"), ({"shuffle_block": 8}, "--shuffle-block 8")]
)
def test_what_it_excludes(others: dict[str, Any], words: str) -> None:
    shares = ClassShares(long_tailed(300, 5), ClassSampling.parse("balanced"), 0)
    with pytest.raises(UsageError, match=mentioning(f"--class-sampling {words} give only one")):
        Stream(samples=300, epochs=1, batch_size=4, global_batch_size=4, seed=0, class_shares=shares, **others)


class Labeled(SimpleNamespace):
    def __len__(self) -> int:
        return 3


def test_a_sample_with_several_labels_counts_to_the_rarest() -> None:
    several: Any = Labeled(labels=np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], np.uint8))
    boxes: Any = Labeled(labels=np.array([2, 1, 2, 2]), first_boxes=np.array([0, 2, 2, 4]))
    estimates: Any = Labeled(labels=np.zeros((3, 2), np.float32))
    assert [
        None if (labels := class_labels(source)) is None else labels.tolist() for source in (several, boxes, estimates)
    ] == [
        [1, 0, -1],
        [1, -1, 2],
        None,
    ]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Labeled(one_each=np.array([0, 1, 1]), labels=lambda ids: ids, classes=("cat", "dog")), None),  # as of clips
        (
            Labeled(one_each=np.array([0, 2, 2]), classes=("cat", "dog", "owl")),
            "1 class without training samples 'dog'",
        ),
        (Labeled(labels=np.array([[1, 0], [1, 0], [0, 0]], np.uint8), classes=("red", "blue")), "1 class 'blue'"),
        (Labeled(labels=np.array([2, 1]), first_boxes=np.array([0, 2, 2, 2]), classes=("a", "b"), first_label=1), None),
        (Labeled(labels=np.zeros((3, 2), np.float32)), "needs samples with classes leave it out"),
        (Labeled(), "needs samples with classes leave it out"),
    ],
)
def test_samples_whose_classes_cannot_be_sampled_are_refused(source: Any, words: str | None) -> None:
    options = replace(DIGITS, class_sampling="balanced")
    with nullcontext() if words is None else pytest.raises(UsageError, match=mentioning(f"--class-sampling {words}")):
        check_class_sampling(options, source)
