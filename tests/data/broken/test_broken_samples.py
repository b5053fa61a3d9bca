"""Broken samples: every kind is found and replaced, alike by both loaders, at every number of ranks and again."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvidia.dali import fn

from raydali.data.broken.quarantine import Quarantine, substitute
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.data.load.dali_loader import DaliLoader
from raydali.data.load.loader import Loader, LoaderOptions
from raydali.data.load.make import LoaderName, make_loader
from raydali.data.read import reading
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import TrainImages, ValidationImages
from raydali.data.tasks.pipeline import Device, Inputs, Samples
from raydali.errors import DataError, StorageAway
from tests.support.broken import KINDS, folder
from tests.support.messages import mentioning, mentions
from tests.support.pictures import assert_like_pillow
from tests.support.quick import first_quick

SAMPLES = 48
BROKEN = {3 * place + 1: kind for place, kind in enumerate(KINDS)}
STREAM = Stream(samples=SAMPLES, epochs=2, batch_size=4, global_batch_size=12, seed=5)
TRAIN = TrainImages(image_size=32, seed=5)
CENTRE = ValidationImages(image_size=32, resize_size=36)
DECODING: tuple[LoaderName, ...] = ("dali", "torch")

Rows = dict[tuple[int, int, int], tuple[int, int, torch.Tensor]]
"""By step, micro-batch and place: id, what replaced it or -1, pixels."""
Loaded = Callable[[LoaderName], tuple[Rows, Quarantine]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> LabeledFiles:
    return folder(tmp_path_factory.mktemp("broken"), SAMPLES, BROKEN)


def load(
    name: LoaderName | Callable[..., Loader],
    source: LabeledFiles,
    rank: int = 0,
    world_size: int = 1,
    start: int = 0,
    stream: Stream = STREAM,
) -> tuple[Rows, Quarantine]:
    quarantine = Quarantine(len(source), seed=stream.seed)
    options = LoaderOptions(rank=rank, world_size=world_size, start=start, threads=2, quarantine=lambda _: quarantine)
    rows: Rows = {}
    make = partial(make_loader, name) if isinstance(name, str) else name
    with make(source, TRAIN, stream, **options) as loader:
        for batch, expected in zip(loader, stream.micro_batches(rank, world_size, start=start), strict=True):
            one = batch.micro_batch
            assert (one.number, one.ids.tolist()) == (expected.number, expected.ids.tolist())
            replaced = np.full(len(one.ids), -1) if one.replaced_by is None else one.replaced_by
            assert batch["labels"].tolist() == source.labels[one.read_ids].tolist()
            for place, image in enumerate(batch["images"].clone()):
                rows[one.step, one.index, place] = int(one.ids[place]), int(replaced[place]), image
    return rows, quarantine


def same(rows: Rows, others: Rows) -> bool:
    return rows.keys() == others.keys() and all(
        row[:2] == others[key][:2] and torch.equal(row[2], others[key][2]) for key, row in rows.items()
    )


@pytest.fixture(scope="module", params=DECODING)
def name(request: pytest.FixtureRequest) -> LoaderName:
    name: LoaderName = request.param
    return name


@pytest.fixture(scope="module")
def whole(source: LabeledFiles) -> Loaded:
    return cache(lambda name: load(name, source))


def test_each_broken_sample_and_no_other_is_replaced(source: LabeledFiles, whole: Loaded, name: LoaderName) -> None:
    rows, quarantine = whole(name)
    assert quarantine.known.keys() == BROKEN.keys()
    for id, sample in quarantine.known.items():
        assert (sample.id, sample.path) == (id, source.path(id)) and sample.reason
    epoch_of = {(m.step, m.index): m.epochs for m in STREAM.micro_batches(0, 1)}
    for (step, index, place), (id, replaced_by, _) in rows.items():
        if id not in BROKEN:
            assert replaced_by == -1
            continue
        epoch = int(epoch_of[step, index][place])
        tried = [substitute(STREAM.seed, epoch, id, attempt, SAMPLES) for attempt in range(9)]
        assert replaced_by == next(other for other in tried if other not in BROKEN)
    assert sum(replaced_by >= 0 for _, replaced_by, _ in rows.values()) == 2 * len(BROKEN)


def test_several_labels_follow_the_images_that_are_read(source: LabeledFiles, name: LoaderName) -> None:
    labels = np.random.default_rng(0).integers(0, 2, (SAMPLES, 3), np.uint8)
    rows, quarantine = load(name, replace(source, labels=labels))  # compares the labels of each batch
    assert quarantine.known.keys() == BROKEN.keys() and any(replaced >= 0 for _, replaced, _ in rows.values())


def test_reasons_are_told(whole: Loaded) -> None:
    _, quarantine = whole("dali")
    reasons = {BROKEN[id]: sample.reason for id, sample in quarantine.known.items()}
    assert reasons["vanished"] == reasons["dangling-link"] == os.strerror(errno.ENOENT)
    assert reasons["folder"] == os.strerror(errno.EISDIR)
    assert "truncated" in reasons["cut-short"] and "without its end" in reasons["filled-up"]
    assert mentions(reasons["bomb"], "178956970")


def test_dali_and_torch_replace_alike(whole: Loaded) -> None:
    (ours, _), (theirs, _) = whole("dali"), whole("torch")
    assert {key: row[:2] for key, row in ours.items()} == {key: row[:2] for key, row in theirs.items()}
    by_dali, by_torch = (torch.stack([row[2] for row in rows.values()]) for rows in (ours, theirs))
    assert_like_pillow(by_dali, by_torch)


@first_quick("world_size", [2, 3])
def test_ids_and_pixels_do_not_depend_on_the_number_of_ranks(
    source: LabeledFiles, whole: Loaded, name: LoaderName, world_size: int
) -> None:
    shared: Rows = {}
    for rank in range(world_size):
        shared |= load(name, source, rank, world_size)[0]
    assert same(shared, whole(name)[0])


def test_a_rerun_and_a_start_in_the_middle_replace_alike(source: LabeledFiles, whole: Loaded, name: LoaderName) -> None:
    rows, _ = whole(name)
    later, _ = load(name, source, start=4)
    assert same(later, {key: row for key, row in rows.items() if key[0] >= 4})


def test_what_is_known_from_elsewhere_changes_nothing(source: LabeledFiles, whole: Loaded) -> None:
    rows, known = whole("dali")
    quarantine = Quarantine(SAMPLES, seed=STREAM.seed)
    quarantine.add(known.known.values())
    with make_loader("dali", source, TRAIN, STREAM, quarantine=lambda _: quarantine) as loader:
        images = torch.cat([batch["images"].clone() for batch in loader])
    assert torch.equal(images, torch.stack([row[2] for row in rows.values()]))
    assert not quarantine.drain_new()


def test_they_are_replaced_alike_in_micro_batches_that_are_decoded_together(
    source: LabeledFiles, whole: Loaded
) -> None:
    rows, quarantine = whole("dali")
    together, others = load(partial(DaliLoader, together=3), source)
    assert same(rows, together) and quarantine.known.keys() == others.known.keys()


def test_of_micro_batches_that_are_decoded_together_they_are_left_out(tmp_path: Path) -> None:
    source = folder(tmp_path, 18, dict.fromkeys([1, *range(4, 8), 9, 17], "text"))
    order = OrderedPass(samples=18, batch_size=4)
    with DaliLoader(source, CENTRE, order, together=3, quarantine=lambda _: Quarantine(18)) as loader:
        for _ in range(2):
            batches = [(batch.micro_batch.step, batch.ids.tolist(), batch["labels"].tolist()) for batch in loader]
            left = [(0, [0, 2, 3]), (2, [8, 10, 11]), (3, [12, 13, 14, 15]), (4, [16])]
            assert batches == [(step, ids, source.labels[ids].tolist()) for step, ids in left]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_alone(tmp_path: Path, name: LoaderName, kind: str) -> None:
    stream = Stream(samples=16, epochs=1, batch_size=4, global_batch_size=4, seed=0)
    source = folder(tmp_path, 16, {6: kind})
    rows, quarantine = load(name, source, stream=stream)
    assert quarantine.known.keys() == {6}
    assert [id for id, replaced_by, _ in rows.values() if replaced_by >= 0] == [6]


def test_in_validation_they_are_left_out(source: LabeledFiles, name: LoaderName) -> None:
    quarantine = Quarantine(SAMPLES)
    order = OrderedPass(samples=SAMPLES, batch_size=5)
    with make_loader(name, source, CENTRE, order, quarantine=lambda _: quarantine) as loader:
        for _ in range(2):
            seen = [id for batch in loader for id in batch.ids.tolist()]
            assert seen == [id for id in range(SAMPLES) if id not in BROKEN]
            assert all(len(batch["images"]) == len(batch.ids) == len(batch["labels"]) for batch in loader)
    assert quarantine.known.keys() == BROKEN.keys()


def test_a_batch_of_which_nothing_is_left_is_passed_over(tmp_path: Path, name: LoaderName) -> None:
    source = folder(tmp_path, 12, dict.fromkeys(range(8), "text"))
    quarantine = Quarantine(12)
    order = OrderedPass(samples=12, batch_size=4)
    with make_loader(name, source, CENTRE, order, quarantine=lambda _: quarantine) as loader:
        assert [batch.ids.tolist() for batch in loader] == [[8, 9, 10, 11]]


def test_without_a_quarantine_the_first_is_an_error(source: LabeledFiles, name: LoaderName) -> None:
    with (
        make_loader(name, source, CENTRE, OrderedPass(samples=SAMPLES, batch_size=4)) as loader,
        pytest.raises(DataError, match=mentioning("1 /0/0001.jpg verify")),
    ):
        list(loader)


def test_where_everything_vanished_nothing_stands_in(source: LabeledFiles, name: LoaderName, tmp_path: Path) -> None:
    gone = source.relocate(str(tmp_path))
    for id in range(SAMPLES):
        Path(gone.path(id)).with_name("others").mkdir(parents=True, exist_ok=True)
    quarantine = Quarantine(SAMPLES, seed=0)
    with (
        make_loader(name, gone, TRAIN, STREAM, quarantine=lambda _: quarantine) as loader,
        pytest.raises(DataError, match=mentioning(f"100 {tmp_path}/ verify")),
    ):
        list(loader)


def test_without_one_sound_sample_there_is_no_resident_batch(tmp_path: Path, name: LoaderName) -> None:
    source = folder(tmp_path, 12, dict.fromkeys(range(12), "text"))
    with (
        make_loader(name, source, CENTRE, OrderedPass(samples=12, batch_size=4)) as loader,
        pytest.raises(DataError, match=mentioning(f"12 {source.path(0)} verify")),
    ):
        loader.resident_batch(4)


def test_more_broken_ones_do_not_cost_more_stalls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, original = [], DaliLoader._build

    def counted(loader: DaliLoader) -> bool:
        built.append(loader)
        return original(loader)

    monkeypatch.setattr(DaliLoader, "_build", counted)
    stream = Stream(samples=120, epochs=1, batch_size=4, global_batch_size=4, seed=0)
    kinds = ("cut-short", "vanished", "text", "empty", "png-cut-short")
    source = folder(tmp_path, 120, {id: kinds[id % 5] for id in range(3, 120, 6)})
    rows, quarantine = load("dali", source, stream=stream)
    assert len(quarantine.known) == 20 and len(rows) == 120
    assert len(built) == 1  # at the start: what was decoded ahead is never thrown away


def test_what_dali_alone_refuses_is_replaced(tmp_path: Path) -> None:
    class Picky(TrainImages):
        """Its graph cannot do with images of one class."""

        def graph(self, source: LabeledSource, *inputs: Any, device: Device) -> tuple[Any, ...]:
            images, labels = super().graph(source, *inputs, device=device)
            return fn.python_function(images, labels, function=_refuse), labels

    stream = Stream(samples=24, epochs=1, batch_size=4, global_batch_size=4, seed=0)
    source = folder(tmp_path, 24, {})
    source.labels[[5, 17]] = 99
    quarantine = Quarantine(24, seed=0)
    with make_loader("dali", source, Picky(image_size=16, seed=0), stream, quarantine=lambda _: quarantine) as loader:
        batches = [batch.micro_batch for batch in loader]
    assert quarantine.known.keys() == {5, 17}
    assert all(mentions(sample.reason, "Pillow DALI") for sample in quarantine.known.values())
    assert sum(batch.replaced for batch in batches) == 2
    assert [id for batch in batches for id in batch.ids] == [id for m in stream.micro_batches(0, 1) for id in m.ids]


def _refuse(image: np.ndarray, label: np.ndarray) -> np.ndarray:
    if label == 99:
        raise RuntimeError("no such image")
    return image


class Choosy(TrainImages):
    """It raises an error of its own for images of one class."""

    def inputs(self, source: LabeledSource, samples: Samples) -> Inputs:
        if (source.labels[samples.ids] == 99).any():
            raise KeyError("no such class")
        return super().inputs(source, samples)

    def sample(self, source: LabeledSource, id: int, epoch: int) -> tuple[torch.Tensor, ...]:
        self.inputs(source, Samples.one(id, epoch, (60, 60)))
        return super().sample(source, id, epoch)


def test_an_error_of_any_type_is_its_samples(tmp_path: Path, name: LoaderName) -> None:
    source = folder(tmp_path, 24, {})
    source.labels[[5, 17]] = 99
    stream, quarantine = Stream(samples=24, epochs=1, batch_size=4, global_batch_size=4, seed=0), Quarantine(24, seed=0)
    with make_loader(name, source, Choosy(image_size=16, seed=0), stream, quarantine=lambda _: quarantine) as loader:
        assert sum(batch.micro_batch.replaced for batch in loader) == 2
    assert {id: sample.reason for id, sample in quarantine.known.items()} == dict.fromkeys((5, 17), "'no such class'")


class OutOfMemoryError(RuntimeError):
    pass


class Failing(ValidationImages):
    """Its inputs cannot be made for sample 5."""

    def inputs(self, source: LabeledSource, samples: Samples) -> Inputs:
        if 5 in samples.ids:
            raise OutOfMemoryError("no memory for sample 5")
        return super().inputs(source, samples)


@pytest.mark.parametrize("broken", [{}, {0: "text"}, {4: "text"}])
def test_errors_of_a_pipeline_come_out_as_they_are(tmp_path: Path, broken: dict[int, str]) -> None:
    source, quarantine = folder(tmp_path, 40, broken), Quarantine(40)
    pipeline, order = Failing(image_size=16, resize_size=16), OrderedPass(samples=40, batch_size=4)
    with make_loader("dali", source, pipeline, order, quarantine=lambda _: quarantine) as loader:
        for _ in range(2):
            with pytest.raises(OutOfMemoryError, match=r"^no memory.* 5$"):
                list(loader)


def test_storage_that_fails_is_not_the_samples_fault(
    tmp_path: Path, name: LoaderName, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(reading, "SECONDS", 0.5)
    source = folder(tmp_path, 8, {2: "text"})
    monkeypatch.setattr(Path, "read_bytes", failing)
    quarantine = Quarantine(8, seed=0)
    order = Stream(samples=8, epochs=1, batch_size=4, global_batch_size=4, seed=0)
    with (
        make_loader(name, source, TRAIN, order, quarantine=lambda _: quarantine) as loader,
        pytest.raises(StorageAway, match=mentioning("storage sample Input/output")),
    ):
        list(loader)
    assert not quarantine.known


def test_permission_is_looked_for_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder(tmp_path, 3, {})
    read = LabeledFiles.read

    def denied(self: LabeledFiles, id: int) -> bytes:
        if id == 1:  # tests run as root, who may read everything
            raise PermissionError(errno.EACCES, "Permission denied", self.path(id))
        return read(self, id)

    monkeypatch.setattr(LabeledFiles, "read", denied)
    quarantine = Quarantine(3, seed=0).bound_to(source, TRAIN)
    assert quarantine.examine(range(3)) and quarantine.known[1].reason == "Permission denied"
    assert [quarantine.examine([id]) for id in range(3)] == [False, True, False]
