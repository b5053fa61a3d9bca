"""How a source is cut into parts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydali.inference.parts import MOST_PARTS, PartByPart, cut


@given(samples=st.integers(1, 300_000), batch_size=st.integers(1, 700))
def test_parts_cover_each_id_once(samples: int, batch_size: int) -> None:
    parts = cut(samples, batch_size)
    assert [part.number for part in parts] == [*range(len(parts))]
    ends = [0, *(part.ids.stop for part in parts)]
    assert [part.ids.start for part in parts] == ends[:-1] and ends[-1] == samples
    assert all(part.ids.start % batch_size == 0 and len(part.ids) for part in parts)
    assert len(parts) <= max(2 * MOST_PARTS, 1)


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60), batch_size=st.integers(1, 16))
def test_parts_begin_at_edges_alone(lengths: list[int], batch_size: int) -> None:
    edges = np.cumsum([0, *lengths[:-1]])
    parts = cut(sum(lengths), batch_size, edges)
    assert {part.ids.start for part in parts} <= {*edges.tolist()}
    assert sum(len(part.ids) for part in parts) == sum(lengths)
    assert all(one.ids.stop == other.ids.start for one, other in pairwise(parts))


@pytest.mark.parametrize("chosen", [slice(None), slice(None, None, -1), slice(1, None, 2)])
def test_an_order_has_the_batches_of_its_parts(chosen: slice) -> None:
    parts = cut(1000, 7)[chosen]
    batches = [*PartByPart(samples=1000, batch_size=7, parts=parts).micro_batches(0, 1)]
    assert [id for batch in batches for id in batch.ids.tolist()] == [id for part in parts for id in part.ids]
    assert all(len(batch.ids) <= 7 and batch.ids[0] in parts[batch.step].ids for batch in batches)
