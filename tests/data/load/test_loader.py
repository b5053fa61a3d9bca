"""All three loaders on the CPU: the stream's batches, states, ends, and nothing left behind."""

import gc
import multiprocessing
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from nvidia.dali import fn

from raydali.data.augment.augmentation import Augmentation
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load import depths
from raydali.data.load.dali_loader import ALIGNMENT, DaliLoader
from raydali.data.load.loader import Batch
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import ImageSizes, TrainImages, ValidationImages
from raydali.data.tasks.pipeline import Inputs, Pipeline, Samples
from raydali.errors import DataError
from tests.support.pictures import assert_like_pillow, encoded, files, photograph
from tests.support.quick import first_quick

NAMES: tuple[LoaderName, ...] = get_args(LoaderName)
DECODING: tuple[LoaderName, ...] = ("dali", "torch")

STREAM = Stream(samples=30, epochs=2, batch_size=4, global_batch_size=12, seed=1)
PASS = OrderedPass(samples=30, batch_size=8)
TRAIN = TrainImages(image_size=32, seed=3)
AUGMENTED = replace(TRAIN, augmentation=Augmentation("trivial", erase=0.3))
VALIDATION = ValidationImages(image_size=32, resize_size=40)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    images = (photograph(("china", "flower")[i % 2], (60 + i, 90 - i)) for i in range(30))
    return files(tmp_path_factory.mktemp("images"), **{str(i): encoded(image) for i, image in enumerate(images)})


def images_by_sample(batches: list[Batch]) -> dict[tuple[int, int], torch.Tensor]:
    return {
        key: image
        for batch in batches
        for key, image in zip(
            zip(batch.ids.tolist(), batch.micro_batch.epochs.tolist(), strict=True), batch["images"], strict=True
        )
    }


def ids(batches: list[Batch]) -> list[list[int]]:
    return [batch.ids.tolist() for batch in batches]


@pytest.mark.parametrize("name", NAMES)
def test_batches_are_the_streams(name: LoaderName, source: LabeledFiles) -> None:
    expected = [*STREAM.micro_batches(1, 2)]
    with make_loader(name, source, TRAIN, STREAM, rank=1, world_size=2) as loader:
        for batch, micro_batch in zip(loader, expected, strict=True):
            assert batch.micro_batch.number == micro_batch.number
            assert batch.ids.tolist() == micro_batch.ids.tolist()
            assert batch.micro_batch.epochs.tolist() == micro_batch.epochs.tolist()
            images, labels = batch["images"], batch["labels"]
            assert (images.shape, images.dtype) == ((4, 3, 32, 32), torch.uint8)
            assert images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()
            assert (labels.shape, labels.dtype) == ((4,), torch.int64)
            if name != "synthetic":
                assert labels.tolist() == source.labels[batch.ids].tolist()


@pytest.mark.parametrize("together", [2, 3, 7])
def test_micro_batches_that_are_decoded_together_are_the_same(together: int, source: LabeledFiles) -> None:
    stream = Stream(samples=30, epochs=3, batch_size=3, global_batch_size=6, seed=1)
    growing = replace(AUGMENTED, image_sizes=ImageSizes(32, 64, 0, 2))
    with (
        DaliLoader(source, growing, stream, rank=1, world_size=2) as alone,
        DaliLoader(source, growing, stream, rank=1, world_size=2, together=together) as joined,
    ):
        for expected, batch in zip(alone, joined, strict=True):
            assert (expected.micro_batch.number, ids([expected])) == (batch.micro_batch.number, ids([batch]))
            assert alone.state_dict() == joined.state_dict()
            assert all(torch.equal(expected[name], batch[name]) for name in ("images", "labels"))
            assert all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in batch.tensors.values())
            assert batch["images"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("size", "together"), [(1, 1), (2, 4), (64, 4), (96, 2), (128, 2), (129, 1), (512, 1)])
def test_how_many_micro_batches_a_gpu_decodes_together(size: int, together: int) -> None:
    assert depths.together(size) == together


@pytest.mark.parametrize("together", [1, 3])
def test_an_iteration_that_began_ahead_gives_the_same_batches(together: int, source: LabeledFiles) -> None:
    with (
        DaliLoader(source, VALIDATION, PASS) as usual,
        DaliLoader(source, VALIDATION, PASS, together=together) as ahead,
    ):
        for begins in (True, True, False):
            if begins:
                ahead.begin_ahead()
            for expected, batch in zip(usual, ahead, strict=True):
                assert ids([expected]) == ids([batch]) and torch.equal(expected["images"], batch["images"])


def test_what_began_ahead_is_decoded_before_it_is_asked_for(source: LabeledFiles) -> None:
    with DaliLoader(source, VALIDATION, PASS) as loader:
        next(iter(loader))
        loader.begin_ahead()  # it ends this iteration
        assert loader._ahead is not None
        first = loader._ahead.wait()
        assert first is not None and first.ids.tolist() == [*range(8)]
        loader.begin_ahead()
        assert next(iter(loader)).ids.tolist() == [*range(8)]


def test_an_error_of_what_began_ahead_is_one_of_the_iteration(tmp_path: Path) -> None:
    with DaliLoader(files(tmp_path, broken=b"no image"), VALIDATION, OrderedPass(samples=1, batch_size=8)) as loader:
        loader.begin_ahead()
        with pytest.raises(DataError, match="broken"):
            next(iter(loader))


def test_a_rank_without_batches_begins_ahead_too(source: LabeledFiles) -> None:
    with DaliLoader(source, VALIDATION, PASS, rank=4, world_size=5) as loader:
        loader.begin_ahead()
        assert list(loader) == []


@pytest.mark.parametrize(("name", "most"), [("dali", 4), ("torch", 3), ("synthetic", None)])
def test_how_many_batches_lie_ready(name: LoaderName, most: int | None, source: LabeledFiles) -> None:
    with make_loader(name, source, TRAIN, STREAM) as loader:
        assert loader.prepared_batches in (0, None)
        batches = iter(loader)
        next(batches)
        assert most is None or eventually(lambda: loader.prepared_batches != 0)
        assert loader.prepared_batches is None if most is None else 0 < (loader.prepared_batches or 0) <= most
        for _ in batches:
            pass
        assert loader.prepared_batches in (0, None)


def test_the_synthetic_batch_is_resident_noise(source: LabeledFiles) -> None:
    first, *others = make_loader("synthetic", source, VALIDATION, PASS)
    assert abs(float(first["images"].float().mean()) - 127.5) < 2 and len(first["images"].unique()) == 256
    assert all(batch["images"].data_ptr() == first["images"].data_ptr() for batch in others)


@pytest.mark.parametrize(("pipeline", "order"), [(TRAIN, STREAM), (VALIDATION, PASS)])
def test_dali_and_torch_give_the_same_crops(pipeline: Any, order: Stream | OrderedPass, source: LabeledFiles) -> None:
    with make_loader("dali", source, pipeline, order) as one, make_loader("torch", source, pipeline, order) as other:
        batches = [*zip(one, other, strict=True)]
    ours, theirs = (torch.cat([pair[i]["images"] for pair in batches]) for i in (0, 1))
    assert_like_pillow(ours, theirs)


@first_quick("name", DECODING)
def test_pixels_do_not_depend_on_the_number_of_ranks(name: LoaderName, source: LabeledFiles) -> None:
    def collect(rank: int, world_size: int, threads: int) -> dict[tuple[int, int], torch.Tensor]:
        with make_loader(name, source, AUGMENTED, STREAM, rank=rank, world_size=world_size, threads=threads) as loader:
            return images_by_sample([*loader])

    alone = collect(0, 1, threads=2)
    shared: dict[tuple[int, int], torch.Tensor] = {}
    for rank in range(3):
        shared |= collect(rank, 3, threads=1)
    assert len(alone) == STREAM.steps * STREAM.global_batch_size
    assert alone.keys() == shared.keys()
    assert all(torch.equal(alone[key], shared[key]) for key in alone)


@first_quick("world_size", [3, 1, 2])
@first_quick("name", NAMES)
def test_states_count_what_was_consumed(name: LoaderName, world_size: int, source: LabeledFiles) -> None:
    for rank in range(world_size):
        share = STREAM.micro_batches_of(rank, world_size)
        with make_loader(name, source, TRAIN, STREAM, rank=rank, world_size=world_size, start=1) as loader:
            assert loader.state_dict() == STREAM.state(1)
            for taken, _ in enumerate(loader, 1):
                assert loader.state_dict() == STREAM.state(1 + taken // share)
            assert loader.state_dict() == STREAM.state(STREAM.steps)
            next(iter(loader))
            assert loader.state_dict() == STREAM.state(1 + 1 // share)


def test_an_ordered_pass_has_no_state(source: LabeledFiles) -> None:
    with pytest.raises(TypeError, match="not OrderedPass"):
        make_loader("synthetic", source, VALIDATION, PASS).state_dict()


@pytest.mark.parametrize("name", DECODING)
def test_a_loader_that_starts_later_gives_the_rest(name: LoaderName, source: LabeledFiles) -> None:
    with make_loader(name, source, TRAIN, STREAM) as loader:
        whole = [*loader]
    for start in (1, 4, STREAM.steps):
        with make_loader(name, source, TRAIN, STREAM, start=start) as loader:
            for batch, expected in zip(loader, whole[3 * start :], strict=True):
                assert batch.micro_batch.number == expected.micro_batch.number
                assert torch.equal(batch["images"], expected["images"])


@pytest.mark.parametrize("name", NAMES)
def test_iterating_again_gives_the_same_again(name: LoaderName, source: LabeledFiles) -> None:
    with make_loader(name, source, VALIDATION, PASS) as loader:
        first = [*loader]
        assert ids(first) == [[*range(8)], [*range(8, 16)], [*range(16, 24)], [*range(24, 30)]]
        assert [len(batch["images"]) for batch in first] == [len(batch["labels"]) for batch in first] == [8, 8, 8, 6]
        for stop in (1, 2, 3, 4):
            broken_off = iter(loader)
            for _ in range(stop):
                next(broken_off)
            again = [*loader]
            assert ids(again) == ids(first)
            assert all(torch.equal(one["images"], two["images"]) for one, two in zip(again, first, strict=True))
            assert [*broken_off] == []


@pytest.mark.parametrize("name", NAMES)
def test_ranks_share_a_pass_that_does_not_divide(name: LoaderName, source: LabeledFiles) -> None:
    few = OrderedPass(samples=12, batch_size=8)
    for rank, expected in enumerate([[[*range(8)]], [[8, 9, 10, 11]], []]):
        with make_loader(name, source, VALIDATION, few, rank=rank, world_size=3) as loader:
            assert [ids([*loader]) for _ in range(2)] == [expected] * 2
            assert all(len(batch["images"]) == len(batch.ids) for batch in loader)


@pytest.mark.parametrize("name", DECODING)
def test_batches_stay_as_they_were_handed_out(name: LoaderName, source: LabeledFiles) -> None:
    with make_loader(name, source, TRAIN, STREAM) as loader:
        kept = [(batch["images"], batch["images"].clone()) for batch in loader]
    gc.collect()
    assert all(torch.equal(image, copy) for image, copy in kept)


def threads() -> set[str]:
    """The ids of this process's threads: one that has just ended is counted for a moment, but no id comes again."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold: batches are prepared, the kernel forgets a thread that has ended."""
    deadline = time.monotonic() + 120
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize("taken", [0, 2, 4])
@pytest.mark.parametrize("name", DECODING)
def test_closing_frees_threads_and_processes(name: LoaderName, taken: int, source: LabeledFiles) -> None:
    with make_loader(name, source, VALIDATION, PASS, threads=2) as loader:  # what stays is the libraries'
        next(iter(loader))
    gc.collect()
    before = threads()
    assert multiprocessing.active_children() == []

    gc.disable()  # nothing may wait for the garbage collector
    try:
        with make_loader(name, source, VALIDATION, PASS, threads=2) as loader:
            held = iter(loader)
            for _ in range(taken):
                next(held)
            if taken:
                assert threads() - before or len(multiprocessing.active_children()) == 2
        assert multiprocessing.active_children() == []
        assert eventually(lambda: threads() <= before), (threads(), before)
        loader.close()
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["dali", "torch"])
def test_closing_after_an_error_frees_processes_at_once(name: LoaderName, source: LabeledFiles) -> None:
    error = pytest.raises(DataError, match=r"/nowhere/0\d\d/")
    with make_loader(name, source.relocate("/nowhere"), VALIDATION, PASS, threads=2) as loader, error as held:
        next(iter(loader))
    assert multiprocessing.active_children() == []
    assert held.value.__traceback__ is not None  # it holds the frames, and what they refer to


def resident_megabytes() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.slow
def test_long_runs_keep_their_memory_and_handles(name: LoaderName, source: LabeledFiles) -> None:
    stream = Stream(samples=30, epochs=160, batch_size=8, global_batch_size=8, seed=1)
    pipeline = TrainImages(image_size=128, seed=0)  # a batch of 0.4 MB: 160 MB, were each one kept
    seen: list[tuple[float, int]] = []
    with make_loader(name, source, pipeline, stream, threads=2) as loader:
        for taken, _ in enumerate(loader, 1):
            if taken in (200, 600):
                gc.collect()
                seen.append((resident_megabytes(), len([*Path("/proc/self/fd").iterdir()])))
    (memory, handles), (later_memory, later_handles) = seen
    assert later_memory - memory < 20
    assert later_handles - handles < 10


class Owned(np.ndarray[Any, Any]):
    """An array that can be referred to weakly, as what owns its memory."""


@dataclass
class Filled(Pipeline[Any]):
    """Samples of 100 KB that are full of their ids; `made` are the inputs of each batch."""

    made: list[list[weakref.ref[Owned]]]
    outputs: tuple[str, ...] = ("lowest", "highest", "labels")

    def inputs(self, source: Any, samples: Samples) -> Inputs:
        arrays = []
        for id in samples.ids.tolist():
            arrays.append(np.ndarray.__new__(Owned, (100_000,), np.uint8))
            arrays[-1][:] = id
        self.made.append(list(map(weakref.ref, arrays)))
        return arrays, samples.ids

    def graph(self, source: Any, *inputs: Any, device: Any) -> tuple[Any, ...]:
        samples, labels = inputs
        return fn.reductions.min(samples), fn.reductions.max(samples), labels

    def sample(self, source: Any, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        raise NotImplementedError

    def alive(self) -> int:
        """The batches of which DALI or the loader still holds an input."""
        return sum(any(array() is not None for array in batch) for batch in self.made)


def test_inputs_are_let_go_when_dali_is_done_with_them(source: LabeledFiles) -> None:
    pipeline, most = Filled([]), 0
    with make_loader("dali", source, pipeline, OrderedPass(samples=250, batch_size=5)) as loader:
        for batch in loader:
            clutter = [np.full(100_000, 255, np.uint8) for _ in range(10)]  # where inputs would be that were freed
            expected = batch.ids.tolist()
            assert [batch[name].flatten().tolist() for name in ("lowest", "highest", "labels")] == [expected] * 3
            most = max(most, pipeline.alive())
            del clutter
    assert len(pipeline.made) == 50
    assert most <= depths.PREPARED + depths.DECODED + 2
