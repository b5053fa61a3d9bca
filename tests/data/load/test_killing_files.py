"""Files that end the process of their decoder: who starts next, or goes on, tries them in a child process."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from raydali.data.broken import screening
from raydali.data.broken.quarantine import Quarantine
from raydali.data.decode import pillow
from raydali.data.index.labeled import LabeledFiles
from raydali.data.load.loader import MOST_NOTED, InFlight, left_in_flight
from raydali.data.load.make import make_loader
from raydali.data.read.contents import Contents
from raydali.data.stream.stream import MicroBatch, Stream
from raydali.data.tasks.classification import TrainImages
from raydali.host.child import Child
from tests.support.broken import folder
from tests.support.killers import dies_late, dies_of_killers, killer, let_killers_through, pixels_of
from tests.support.ranks import context

SAMPLES, KILLERS = 160, (20, 110)
STREAM = Stream(samples=SAMPLES, epochs=1, batch_size=4, global_batch_size=4, seed=3)
TRAIN = TrainImages(image_size=16, seed=3)


def note_and_die(path: Path, number: int) -> None:
    notes = [InFlight(path / name) for name in ("training", "validation 2")]
    for batch in range(5):
        notes[0].begin(batch, np.arange(10 * batch, 10 * batch + 4))
        notes[1].begin(batch, np.arange(batch, batch + 1))
    notes[0].end(2)
    notes[1].clear()
    os.kill(os.getpid(), number)


def die(path: Path, number: int) -> None:
    process = context.Process(target=note_and_die, args=(path, number))
    process.start()
    process.join()
    assert process.exitcode == -number


def test_what_a_crashed_process_had_in_flight_is_known_at_every_start(tmp_path: Path) -> None:
    die(tmp_path, signal.SIGSEGV)
    assert left_in_flight(tmp_path) == left_in_flight(tmp_path) == {"training": [30, 31, 32, 33, 40, 41, 42, 43]}
    die(tmp_path, signal.SIGABRT)
    assert left_in_flight(tmp_path) == {"training": [30, 31, 32, 33, 40, 41, 42, 43] * 2}


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    die(tmp_path, signal.SIGKILL)
    assert left_in_flight(tmp_path) == {} and not [*tmp_path.glob("training*")]


def test_a_process_that_lives_keeps_its_notes(tmp_path: Path) -> None:
    note = InFlight(tmp_path / "training")
    note.begin(0, np.arange(MOST_NOTED + 5))
    assert left_in_flight(tmp_path) == {} and [*tmp_path.glob("training*")]
    began = time.perf_counter()
    for number in range(1000):
        note.begin(number, np.arange(256))
        note.end(number)
    assert time.perf_counter() - began < 0.1, "less than 100 us a batch"
    note.close()
    assert not [*tmp_path.glob("training*")]


def kill_with(source_root: Path) -> tuple[LabeledFiles, list[int]]:
    source = folder(source_root, SAMPLES, {})
    for id in KILLERS:
        Path(source.path(id)).write_bytes(killer())
    return source, [id for micro_batch in STREAM.micro_batches(0, 1) for id in micro_batch.ids.tolist()]


def test_dali_gets_no_file_that_ends_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or that its decoder does not return from: a failed thread of DALI may leave the others waiting for ever."""
    let_killers_through(monkeypatch.setattr)
    monkeypatch.setattr(screening, "Child", partial(Child, seconds=30.0))
    source, expected = kill_with(tmp_path)
    quarantine, seen = Quarantine(SAMPLES, seed=3), list[int]()
    quarantine.in_flight_at_death = {*range(15, 25), *range(105, 120)}
    with make_loader("dali", source, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
        for batch in loader:
            seen += batch.ids.tolist()
    assert seen == expected
    assert_found(quarantine, source, "did not end within 30 s")


@pytest.mark.slow
def test_a_child_process_that_dies_in_a_later_batch_dies_of_the_file_that_damaged_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_killers_through(monkeypatch.setattr)
    monkeypatch.setattr(screening, "refused", dies_late)
    source = folder(tmp_path, 3, {})
    Path(source.path(1)).write_bytes(killer())
    quarantine = Quarantine(3, seed=3)
    quarantine.in_flight_at_death = {0, 1, 2}
    screened = screening.Screening(quarantine, None, 1)
    try:
        for id in range(3):
            file = np.frombuffer(Path(source.path(id)).read_bytes(), np.uint8)
            screened._try_first(screening.Read(np.array([id]), [Contents([file])]))
    finally:
        screened.close()
    assert {*quarantine.known} == {1}


@pytest.mark.slow
def test_a_worker_process_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank goes on without a restart, once for each file."""
    let_killers_through(monkeypatch.setattr)
    monkeypatch.setattr(pillow, "_decoded_here", dies_of_killers)
    monkeypatch.setattr(pillow, "decoded_pixels", pixels_of)
    source, expected = kill_with(tmp_path)
    quarantine, seen = Quarantine(SAMPLES, seed=3), list[int]()
    with make_loader("torch", source, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
        for batch in loader:
            seen += batch.ids.tolist()
    assert seen == expected
    assert_found(quarantine, source)


def assert_found(quarantine: Quarantine, source: LabeledFiles, *other_reasons: str) -> None:
    assert {*quarantine.known} == {*KILLERS}
    for id, broken in quarantine.known.items():
        assert broken.path == source.path(id) and broken.replaced_by is not None
        assert any(reason in broken.reason for reason in ("has ended (SIG", *other_reasons)), broken.reason


def test_a_worker_process_that_dies_for_another_reason_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = kill_with(tmp_path)
    monkeypatch.setattr(TrainImages, "sample", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with (
        make_loader("torch", source, TRAIN, STREAM, quarantine=lambda _: Quarantine(SAMPLES), threads=2) as loader,
        pytest.raises(RuntimeError, match="DataLoader worker"),
    ):
        list(loader)


def test_a_loader_notes_what_it_has_in_flight(tmp_path: Path) -> None:
    source = folder(tmp_path / "data", SAMPLES, {})
    quarantine = Quarantine(SAMPLES, seed=3)
    quarantine.noted_in = tmp_path / "notes" / "training"
    for name in ("dali", "torch"):
        noted = list[tuple[int, int]]()
        with make_loader(name, source, TRAIN, STREAM, quarantine=lambda _: quarantine, threads=2) as loader:
            for batch in loader:
                slots = loader.in_flight._slots
                ids = slots[2 + slots[1] : 2 + slots[0]].tolist()
                noted.append((len(ids), len({*ids} & {*batch.ids.tolist()})))
        assert max(count for count, _ in noted) >= 8 and noted[-1] == (0, 0) and not any(own for _, own in noted)
        assert not [*quarantine.noted_in.parent.glob("training*")]
    assert isinstance(batch.micro_batch, MicroBatch)
