"""A job over broken images on plain gloo processes: alike on any ranks, across a cut, told once, and limited."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.imagenet import Config, Data, train
from raydali.data.broken.quarantine import Quarantine, substitute
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.exclusion import exclude
from raydali.data.load.make import make_loader
from raydali.data.stream.stream import OrderedPass, Stream
from raydali.data.tasks.classification import ValidationImages
from raydali.errors import DataError
from raydali.launch.worker.bad_samples import BrokenSamples, allowed
from raydali.run.events import FirstCheckpoint
from raydali.run.folder import RunFolder
from tests.support.broken import KINDS, damage
from tests.support.digits import SHORT, digits_data, every_third
from tests.support.job_ranks import train_rank_in_double
from tests.support.messages import mentions
from tests.support.pictures import encoded, files, photograph
from tests.support.ranks import LocalSession, Stopped, folder_of, run_ranks
from tests.support.traces import read_samples

BROKEN = {30 * place + 7: kind for place, kind in enumerate(KINDS)}
IN_VALIDATION = {3: "cut-short", 100: "vanished"}
CONFIG = replace(SHORT, data="elsewhere", learning_rate=0.01, max_bad_fraction=0.05)
in_double = partial(train_rank_in_double, train)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """Copies of every third digit."""
    root = tmp_path_factory.mktemp("digits")
    shutil.copytree(every_third(digits_folder(), root / "links"), root / "copy")
    data = digits_data(root / "copy")
    for source, broken in ((data.train, BROKEN), (data.val, IN_VALIDATION)):
        for id, kind in broken.items():
            damage(Path(source.path(id)), kind)
    return data


def reported(config: Config, data: Data, folder: RunFolder, stop_at: int | None = None) -> tuple[Any, str]:
    """The events that a rank reported, which are written to the folder, and what it ended with."""
    session = LocalSession(folder, stop_at=stop_at)
    ended = ""
    try:
        train(config, data, session)
    except DataError as error:
        ended = str(error)
    session.checkpoints.finish()
    for row in session.rows if session.worker.rank == 0 else ():  # as the driver, which is the only one that appends
        folder.append("events.jsonl", row)
    return session.rows, ended


@pytest.fixture(scope="module")
def alone(data: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[str, Any]]:
    folder = folder_of(tmp_path_factory.mktemp("alone"))
    return folder, run_ranks(1, in_double, CONFIG, data, folder)[0]


def rows(folder: RunFolder) -> list[tuple[Any, ...]]:
    table = read_samples(folder)
    return list(zip(*(table[name].to_pylist() for name in ("step", "micro_batch", "id", "replaced_by")), strict=True))


@pytest.mark.slow
def test_order_stays_and_the_trace_names_what_stood_in(alone: tuple[RunFolder, Any], data: Data) -> None:
    folder, _ = alone
    found = rows(folder)
    stream = CONFIG.stream(len(data.train))
    batches = [*stream.micro_batches(0, 1)]
    epochs = np.concatenate([batch.epochs for batch in batches]).tolist()
    assert [id for _, _, id, _ in found] == np.concatenate([batch.ids for batch in batches]).tolist()
    for (_, _, id, replaced_by), epoch in zip(found, epochs, strict=True):
        assert (replaced_by is not None) == (id in BROKEN)
        if id in BROKEN:
            tried = (substitute(CONFIG.seed, epoch, id, attempt, len(data.train)) for attempt in range(9))
            assert replaced_by == next(other for other in tried if other not in BROKEN)
    lines = folder.rows("epochs.jsonl")
    assert sum(line["quarantined"] for line in lines) == sum(replaced is not None for *_, replaced in found)
    assert [line["images"] for line in lines] == [480, 384]
    for line in lines:
        assert (line["validation"]["images"], line["validation"]["broken"]) == (118, 2)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_run_is_the_same_on_more_ranks(
    tmp_path: Path, alone: tuple[RunFolder, Any], data: Data, world_size: int
) -> None:
    folder = folder_of(tmp_path)
    weights = run_ranks(world_size, in_double, CONFIG, data, folder)[0]
    assert rows(folder) == rows(alone[0])
    for line, other in zip(folder.rows("epochs.jsonl"), alone[0].rows("epochs.jsonl"), strict=True):
        assert line["quarantined"] == other["quarantined"]
        assert line["loss"] == pytest.approx(other["loss"], rel=1e-6)
        assert line["validation"]["loss"] == pytest.approx(other["validation"]["loss"], rel=1e-6)
    for name, tensor in weights.items():
        np.testing.assert_allclose(tensor, alone[1][name], rtol=1e-6, atol=1e-9)


def test_a_cut_and_a_resume_on_other_ranks_change_nothing(
    tmp_path: Path, alone: tuple[RunFolder, Any], data: Data
) -> None:
    folder = folder_of(tmp_path)
    config = replace(CONFIG, checkpoint_every=2)
    with pytest.raises(Stopped):
        run_ranks(2, in_double, config, data, folder, 3)
    with pytest.raises(Stopped):
        run_ranks(3, in_double, config, data, folder, 8)
    run_ranks(1, in_double, config, data, folder)
    assert rows(folder) == rows(alone[0])
    counts = [[line["quarantined"] for line in one.rows("epochs.jsonl")] for one in (folder, alone[0])]
    assert counts[0] == counts[1]


@pytest.mark.slow
def test_each_is_told_once_and_kept_in_checkpoints(tmp_path: Path, data: Data) -> None:
    folder = folder_of(tmp_path)
    (events, _), *others = run_ranks(2, reported, replace(CONFIG, epochs=1), data, folder)
    assert [row for of_rank, _ in others for row in of_rank if row["event"] != "start"] == []
    found = {(event["of"], event["id"]): event for event in events if event["event"] == "quarantine"}
    assert found.keys() == {*(("training", id) for id in BROKEN), *(("validation", id) for id in IN_VALIDATION)}
    assert len(found) == len([event for event in events if event["event"] == "quarantine"])
    for (of, id), event in found.items():
        assert event["path"] == (data.train if of == "training" else data.val).path(id) and event["reason"]
        assert (event["replaced_by"] is None) == (of == "validation")

    assert run_ranks(1, saved_ids, folder) == [sorted(BROKEN)]
    (again, _), *_ = run_ranks(2, reported, replace(CONFIG, epochs=2), data, folder_with_events(folder, tmp_path))
    assert not [event for event in again if event["event"] == "quarantine"]


def saved_ids(folder: RunFolder) -> list[int]:
    """The broken training samples of the newest checkpoint."""
    state = LocalSession(folder).checkpoints.newest()
    assert state is not None
    return [int(sample["id"]) for sample in state["quarantine"]["training"]]


def folder_with_events(folder: RunFolder, path: Path) -> RunFolder:
    """A run that ended before its first checkpoint."""
    other = folder_of(path, "other")
    for row in folder.rows("events.jsonl"):
        if row["event"] != FirstCheckpoint.event:
            other.append("events.jsonl", row)
    return other


@pytest.mark.slow
def test_too_many_stop_all_ranks_together_with_the_list(tmp_path: Path, data: Data) -> None:
    config = replace(CONFIG, max_bad_fraction=0.01)  # 4 of 479
    ends = [ended for _, ended in run_ranks(3, reported, config, data, folder_of(tmp_path))]
    assert len({*ends}) == 1
    *listed, last = ends[0].splitlines()
    assert listed[0] == "broken training samples:" and mentions(ends[0], f"{data.train.path(7)} truncated")
    assert mentions(last, "479 --max-bad-fraction 0.01 4 --exclude")


@pytest.mark.slow
def test_what_is_excluded_leaves_the_stream(tmp_path: Path, data: Data) -> None:
    listed = [*(data.train.path(id) for id in BROKEN), *(data.val.path(id) for id in IN_VALIDATION)]
    (tmp_path / "broken.txt").write_text("# a list\n" + "".join(f"{path}\twhy\n" for path in listed))
    train_set, val = exclude(str(tmp_path / "broken.txt"), data.train, data.val)
    assert (len(train_set), len(val)) == (479 - len(BROKEN), 118)
    assert train_set.fingerprint != data.train.fingerprint
    folder = folder_of(tmp_path)
    run_ranks(2, in_double, replace(CONFIG, epochs=1, max_bad_fraction=0.0), Data(train_set, val), folder)
    (line,) = folder.rows("epochs.jsonl")
    assert (line["quarantined"], line["validation"]["images"], line["validation"]["broken"]) == (0, 118, 0)
    ids = [id for *_, id, _ in rows(folder)]
    assert len(ids) == len(set(ids)) == line["images"]


@pytest.mark.parametrize(
    ("share", "samples", "most"),
    [(0.001, 500, 1), (0.001, 1999, 1), (0.001, 2000, 2), (0.001, 1_281_167, 1281), (0.0, 5000, 0), (0.5, 3, 1)],
)
def test_how_many_may_be_broken(share: float, samples: int, most: int) -> None:
    assert allowed(share, samples) == most


SETS: list[tuple[str, dict[int, str]]] = [("val", {3: "cut-short"}), ("test", {}), ("more", {5: "vanished"})]


@pytest.mark.parametrize("order", [SETS, SETS[::-1]], ids=["first", "last"])
def test_each_validation_set_has_its_own(tmp_path: Path, order: list[tuple[str, dict[int, str]]]) -> None:
    """One set's broken id was left out of the next, or taken for sound in it."""
    made = run_ranks(1, seen_of_sets, tmp_path, order)[0]
    for name, broken in order:
        assert made["seen"][name] == [id for id in range(12) if id not in broken]
    place = {name: i for i, (name, _) in enumerate(order)}
    named = [f"validation {place[name] + 1}" if place[name] else "validation" for name, broken in SETS if broken]
    assert sorted(made["told"]) == sorted(zip(named, [3, 5], strict=True))
    assert made["in_validation"] == 2


def seen_of_sets(path: Path, order: list[tuple[str, dict[int, str]]]) -> dict[str, Any]:
    """What loaders of validation sets, of the same names at other places, hand out in one run."""
    session = LocalSession(folder_of(path))
    known = BrokenSamples(replace(CONFIG, max_bad_fraction=0.5), session, samples=100)
    pipeline, seen = ValidationImages(image_size=8, resize_size=8), {}
    loaders = []
    for name, broken in order:
        source = files(path / name, **{f"{i}": encoded(photograph(size=(20, 30))) for i in range(12)})
        for id, kind in broken.items():
            damage(Path(source.path(id)), kind)
        ordered = OrderedPass(samples=12, batch_size=4)
        loaders.append(make_loader("dali", source, pipeline, ordered, quarantine=known.of))
        again = make_loader("dali", source.relocate(source.root), pipeline, ordered, quarantine=known.of)
        assert again.quarantine is loaders[-1].quarantine
    for _ in range(2):
        for (name, _), loader in zip(order, loaders, strict=True):
            seen[name] = [id for batch in loader for id in batch.ids.tolist()]
        known.exchange()
    told = [(event["of"], event["id"]) for event in session.rows if event["event"] == "quarantine"]
    return {"seen": seen, "told": told, "in_validation": known.in_validation()}


def test_two_streams_are_saved_apart_and_older_checkpoints_load(tmp_path: Path) -> None:
    state = run_ranks(1, states_of_streams, tmp_path)[0]
    assert {name: [sample["id"] for sample in samples] for name, samples in state["saved"].items()} == {
        "training": [3],
        "training 2": [5],
    }
    assert state["resumed"] == [[3], [5]] and state["older"] == [[3], []]


def states_of_streams(path: Path) -> dict[str, Any]:
    session, made = LocalSession(folder_of(path)), []
    for name in ("one", "two"):
        made.append(files(path / name, **{f"{i}": encoded(photograph(size=(20, 30))) for i in range(12)}))
    stream, pipeline = (
        Stream(samples=12, epochs=1, batch_size=4, global_batch_size=4, seed=0),
        ValidationImages(image_size=8),
    )

    def known(saved: dict[str, Any]) -> tuple[BrokenSamples, list[Quarantine]]:
        samples = BrokenSamples(replace(CONFIG, max_bad_fraction=0.5), session, samples=12)
        samples.resume(saved)
        return samples, [samples.of(stream).bound_to(source, pipeline) for source in made]

    samples, (one, two) = known({})
    one.mark_broken(3, "bad")
    two.mark_broken(5, "bad")
    samples.exchange()
    saved = samples.state()
    resumed, older = (
        [sorted(each.known) for each in known(state)[1]] for state in (saved, {"training": saved["training"]})
    )
    return {"saved": saved, "resumed": resumed, "older": older}


def test_what_one_rank_read_as_a_whole_no_other_reads_again(tmp_path: Path) -> None:
    assert run_ranks(2, sound_of_ranks, tmp_path, folder_of(tmp_path)) == [[[1, 2, 7, 9]] * 2] * 2


def sound_of_ranks(path: Path, folder: RunFolder) -> list[list[int]]:
    """The samples known to be sound after an exchange, and after a resume from what it left."""
    session, found = LocalSession(folder), []
    mine = [[2, 9], [1, 7]][session.worker.rank]
    source = files(path / f"{session.worker.rank}", **{f"{i}": encoded(photograph(size=(9, 9))) for i in range(12)})
    stream = Stream(samples=12, epochs=1, batch_size=4, global_batch_size=4, seed=0)
    saved: dict[str, Any] = {}
    for ids in (mine, []):
        samples = BrokenSamples(CONFIG, session, samples=12)
        samples.resume(saved)
        known = samples.of(stream).bound_to(source, ValidationImages(image_size=8))
        assert not known.examine(ids)
        samples.exchange()
        saved = samples.state()
        found.append(np.flatnonzero(known.sound).tolist())
    return found
