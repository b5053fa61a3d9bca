"""Row groups are read as a whole: how often in an epoch, by several threads, and within what memory."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raydali.data.index.parquet import Parquet
from raydali.data.load.make import make_loader
from raydali.data.read import row_groups
from raydali.data.read.row_groups import RowGroups
from raydali.data.read.storage import ObjectPart
from raydali.data.stream.stream import Stream
from raydali.data.tasks.classification import ValidationImages
from tests.support.broken import jpeg
from tests.support.parquets import write_parquet

ROWS, FILES, ROWS_OF_FILE = 20, 4, 210
SAMPLES = FILES * ROWS_OF_FILE
IMAGES = ValidationImages(image_size=8, resize_size=8)

pytestmark = pytest.mark.usefixtures("tar_cache")

Reads = list[tuple[str, int]]


@pytest.fixture
def images(tmp_path: Path) -> Parquet:
    """840 images in row groups of 20, and in each file a last one of 10."""
    image = jpeg((16, 16))
    for number in range(FILES):
        write_parquet(
            tmp_path / f"{number}.parquet", [image] * ROWS_OF_FILE, [0] * ROWS_OF_FILE, rows=ROWS, use_dictionary=False
        )
    return Parquet.scan(f"{tmp_path}/*.parquet")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The file and the number of each row group that is read."""
    found: Reads = []
    decoded = vars(row_groups)["_decoded"]

    def counted(file: ObjectPart, column: str, group: int) -> Any:
        found.append((file.uri, group))
        return decoded(file, column, group)

    monkeypatch.setitem(vars(row_groups), "_decoded", counted)
    return found


def keep(monkeypatch: pytest.MonkeyPatch, images: Parquet, groups: int) -> Parquet:
    """The images, with memory for so many row groups in a new process."""
    limit = groups * int(images.read_together.group_bytes.max())
    monkeypatch.setitem(vars(row_groups), "_groups", RowGroups(limit))
    vars(images)["read_together"] = replace(images.read_together, kept_bytes=limit)
    return images


def test_whole_row_groups_come_first(images: Parquet) -> None:
    together = images.read_together
    whole = together.groups[: FILES * 200].reshape(-1, ROWS)
    assert (whole == whole[:, :1]).all() and (np.bincount(together.groups)[whole[:, 0]] == ROWS).all()
    assert images.path(200).endswith("1.parquet#0") and images.path(800).endswith("0.parquet#200")
    less = images.drop([3])  # its row group has 19 then
    assert less.path(0).endswith("0.parquet#20") and len(less) == SAMPLES - 1
    assert {*less.relative_paths()} == {*images.relative_paths()} - {"0.parquet#3"}
    assert less.read_together.group_bytes.tolist() == together.group_bytes.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_reads_each_row_group_about_once(
    images: Parquet, reads: Reads, monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    stream = Stream(
        samples=SAMPLES, epochs=1, batch_size=4, global_batch_size=8, seed=1, shuffle_block=ROWS, shuffle_window=4
    )
    stream, counts = replace(stream, shuffle_apart=True), []
    for each in (stream, replace(stream, shuffle_block=0, shuffle_window=0)):
        of_ranks = []
        for rank in range(world_size):
            images = keep(monkeypatch, images, 16)
            reads.clear()
            with make_loader("dali", images, IMAGES, each, rank=rank, world_size=world_size) as loader:
                ids = [id for batch in loader for id in batch.ids.tolist()]
            assert len(ids) == len({*ids})
            of_ranks.append(len(reads))
            read_bytes = sum(int(images.read_together.group_bytes.mean()) for _ in reads)
            expected = images.read_together.amplification(each, world_size)
            if rank == 0:  # prefetching changes the order a little
                assert read_bytes / images.lengths[ids].sum() == pytest.approx(expected, rel=0.15)
        counts.append(sum(of_ranks))
    groups = len(images.read_together.group_bytes)
    in_blocks, in_full = counts
    assert groups <= in_blocks < 1.3 * groups and in_full > 5 * groups


def test_threads_wait_for_one_read() -> None:
    kept, started, go, loads = RowGroups(100), threading.Event(), threading.Event(), Counter[str]()

    def load(name: str) -> Any:
        loads[name] += 1
        started.set()
        go.wait(10)
        if name == "broken":
            raise OSError(name)
        return np.zeros(40, np.uint8)

    with ThreadPoolExecutor(4) as threads:
        for name in ("a", "broken"):
            started.clear()
            go.clear()
            waiting = [threads.submit(kept.get, name, 40, partial(load, name)) for _ in range(4)]
            assert started.wait(10)
            go.set()
            errors = [each.exception() for each in waiting]
            assert all((error is None) == (name == "a") for error in errors)
    assert loads["a"] == 1
    kept.get("b", 40, lambda: load("b"))
    kept.get("a", 40, lambda: load("a"))
    kept.get("c", 40, lambda: load("c"))  # 120 bytes are too many: b was used longest ago
    kept.get("a", 40, lambda: load("a"))
    kept.get("b", 40, lambda: load("b"))
    assert loads["a"] == 1 and loads["b"] == 2


def test_large_reads_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(row_groups), "_READ_AT_ONCE", 100)
    kept, lock, now, most = RowGroups(10), threading.Lock(), [0], [0]
    both = threading.Barrier(2)

    def load(size: int) -> Any:
        with lock:
            now[0] += size
            most[0] = max(most[0], now[0])
        if size == 50:
            both.wait(10)  # two of them fit
        with lock:
            now[0] -= size
        return np.zeros(1, np.uint8)

    with ThreadPoolExecutor(8) as threads:
        for size, count in ((50, 8), (500, 3)):
            list(threads.map(lambda name, size=size: kept.get((size, name), size, lambda: load(size)), range(count)))
            assert most[0] == max(100, size)


def test_a_set_that_fits_is_read_once(images: Parquet, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(monkeypatch, images, 100)
    assert images.read_together.fits
    rng = np.random.default_rng(0)
    for _ in range(3):
        images.contents(rng.permutation(SAMPLES))
    assert max(Counter(reads).values()) == 1 and len(reads) == len(images.read_together.group_bytes)
