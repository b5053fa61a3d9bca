"""Checkpoints: what counts, what is refused, what is kept, and what other ranks get of rank 0."""

import os
import pickle
import re
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from raydali.errors import StorageError
from raydali.run.checkpoints import CheckpointStore
from raydali.run.events import Event
from raydali.run.find import KEPT
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST, BestWeights, read_model
from raydali.training import checkpoint_file
from raydali.training.checkpoint_file import serialize
from raydali.training.worker import Worker
from tests.support.checkpoint_stores import Rows, newest, save, state_of, store_of
from tests.support.messages import mentioning, mentions
from tests.support.ranks import LocalSession, folder_of, run_ranks


def test_the_newest_comes_back_and_the_three_newest_are_kept(folder: RunFolder) -> None:
    assert store_of(folder).newest() is None
    save(folder, 5, 10, 15, 20, 1_000_000_000)
    assert newest(folder) == 1_000_000_000
    names = [f"checkpoint_{step:09d}" for step in (1_000_000_000, 15, 20)]
    assert KEPT == 3 and folder.folders() == sorted(names)
    for name in names:
        assert folder.files(name) == ["manifest.json", "state.pt"]
    manifest = folder.read_json(f"{names[0]}/manifest.json")
    assert manifest["step"] == 1_000_000_000 and manifest["world_size"] == 1 and manifest["format"] == 1
    assert manifest["files"]["state.pt"]["bytes"] == len(folder.read(f"{names[0]}/state.pt"))


def test_those_that_are_to_be_kept_stay(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    worker = store_of(folder)._worker
    store = CheckpointStore(folder, worker, Rows(), lambda step: step % 10 == 0)
    for step in range(5, 50, 5):
        store.save(step, state_of(step))
    store.finish()
    assert [int(name[-3:]) for name in folder.folders()] == [10, 20, 30, 35, 40, 45]


def test_a_half_written_checkpoint_is_ignored_and_then_removed(folder: RunFolder) -> None:
    save(folder, 5)
    folder.write("checkpoint_000000010/state.pt", b"half")
    folder.write("checkpoint_000000007/state.pt.partial-1", b"half")
    rows = Rows()
    assert newest(folder, rows) == 5 and rows == []
    save(folder, 10)
    assert newest(folder) == 10
    assert folder.folders() == ["checkpoint_000000005", "checkpoint_000000010"]


NEW = "checkpoint_000000010"


class Planted:
    """What a pickle calls when it is loaded by those who trust it."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.mark,)


def described(contents: bytes, step: int = 10) -> bytes:
    return checkpoint_file.manifest({"state.pt": checkpoint_file.described(contents)}, step=step, world_size=1)


def truncate(folder: RunFolder) -> None:
    folder.write(f"{NEW}/state.pt", folder.read(f"{NEW}/state.pt")[:-1])


def flip_a_bit(folder: RunFolder) -> None:
    contents = bytearray(folder.read(f"{NEW}/state.pt"))
    contents[len(contents) // 2] ^= 1
    folder.write(f"{NEW}/state.pt", bytes(contents))


def delete_the_state(folder: RunFolder) -> None:
    folder.remove(f"{NEW}/state.pt")


def empty_the_manifest(folder: RunFolder) -> None:
    folder.write(f"{NEW}/manifest.json", b"")


def cut_the_manifest(folder: RunFolder) -> None:
    folder.write(f"{NEW}/manifest.json", folder.read(f"{NEW}/manifest.json")[:50])


def replace_the_manifest(folder: RunFolder) -> None:
    folder.write(f"{NEW}/manifest.json", b'["checkpoint"]')


def copy_another(folder: RunFolder) -> None:
    for file in ("state.pt", "manifest.json"):
        folder.write(f"{NEW}/{file}", folder.read(f"checkpoint_000000005/{file}"))


def come_from_the_future(folder: RunFolder) -> None:
    facts = folder.read_json(f"{NEW}/manifest.json")
    folder.write_json(f"{NEW}/manifest.json", facts | {"format": 4})


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (truncate, r"state.pt has \d+ bytes, not \d+"),
        (flip_a_bit, "state.pt was changed after it was written: its SHA-256 differs"),
        (delete_the_state, "state.pt is missing"),
        (empty_the_manifest, "manifest.json is broken"),
        (cut_the_manifest, "manifest.json is broken"),
        (replace_the_manifest, "manifest.json is broken"),
        (copy_another, "manifest.json is of step 5, not 10"),
        (come_from_the_future, "manifest.json has format 4, this version reads 1 and 3"),
    ],
)
def test_a_broken_one_is_told_and_the_one_before_is_taken(folder: RunFolder, harm: Any, reason: str) -> None:
    save(folder, 5, 10)
    harm(folder)
    rows = Rows()
    assert newest(folder, rows) == 5
    (event,) = rows
    assert event["event"] == "bad checkpoint" and event["path"] == f"{folder}/{NEW}"
    assert re.search(reason, event["reason"])
    # It was put aside: were it readable again, the rows that the run has written since would not go with it.
    assert "refused.json" in folder.files(NEW) and not folder.exists(f"{NEW}/manifest.json")
    rows.clear()
    assert newest(folder, rows) == 5 and rows == []
    save(folder, 7)
    assert newest(folder) == 7
    save(folder, 10)
    assert newest(folder) == 10


@pytest.mark.parametrize("zipped", [True, False])
def test_a_planted_pickle_is_refused_and_not_executed(folder: RunFolder, tmp_path: Path, zipped: bool) -> None:
    save(folder, 5)
    mark = tmp_path / "executed"
    file = BytesIO()
    torch.save({"state": Planted(str(mark))}, file, _use_new_zipfile_serialization=zipped)
    contents = file.getvalue()
    if zipped:
        with zipfile.ZipFile(BytesIO(contents)) as archive:
            planted = archive.read("archive/data.pkl")
    else:
        planted = pickle.dumps(Planted(str(mark)))
    pickle.loads(planted)  # else the test could not fail
    assert mark.exists()
    mark.rmdir()
    folder.write(f"{NEW}/state.pt", contents)
    folder.write(f"{NEW}/manifest.json", described(contents))
    rows = Rows()
    assert newest(folder, rows) == 5
    assert mentions(rows[0]["reason"], "state.pt tensors")
    assert not mark.exists()


def test_without_a_usable_checkpoint_nothing_is_touched(folder: RunFolder) -> None:
    save(folder, 5, 10)
    for name in folder.folders():
        folder.write(f"{name}/state.pt", b"lost")
    for _ in range(2):
        rows = Rows()
        with pytest.raises(StorageError, match=mentioning("no checkpoint_000000010 checkpoint_000000005")):
            store_of(folder, rows).newest()
        assert [event["path"][-2:] for event in rows] == ["10", "05"]
        assert all(folder.exists(f"{name}/manifest.json") for name in folder.folders())


def test_the_first_checkpoint_is_an_event_and_a_run_that_lost_it_does_not_restart(folder: RunFolder) -> None:
    def emit(event: Event) -> None:
        folder.append("events.jsonl", event.row())

    for _ in range(2):  # a worker group, and one after it
        store = CheckpointStore(folder, store_of(folder)._worker, emit)
        step = (store.newest() or {"step": 5})["step"]
        for _ in range(2):
            step += 5
            store.save(step, state_of(step))
        store.finish()
    assert folder.rows("events.jsonl") == [{"event": "checkpoint", "step": 10}]
    for name in folder.folders():
        folder.remove_folder(name)
    with pytest.raises(StorageError, match=mentioning("checkpoint_000000010 --name")):
        store_of(folder).newest()


def test_a_run_that_was_killed_before_its_first_checkpoint_restarts(folder: RunFolder) -> None:
    for epoch in range(3):
        folder.append("epochs.jsonl", {"epoch": epoch, "step": epoch})
    folder.append("events.jsonl", {"event": "start", "step": 0})
    folder.write("checkpoint_000000005/state.pt", b"half")
    assert store_of(folder).newest() is None


def test_a_storage_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, 5)
    Path(folder.path("checkpoint_000000005/state.pt")).rename(folder.path("elsewhere"))
    Path(folder.path("checkpoint_000000005/state.pt")).mkdir()
    with pytest.raises(StorageError, match=mentioning("checkpoints read")):
        store_of(folder).newest()


def test_best_weights_are_kept_beside(folder: RunFolder) -> None:
    store = store_of(folder)
    store.save(5, state_of(5), best=BestWeights({"weight": torch.ones(3)}, 1, "top1", 0.5))
    store.finish()
    best = safetensors.torch.load(folder.read(BEST))
    assert torch.equal(best["weight"], torch.ones(3))
    assert read_model(folder)["best"] == {"epoch": 1, "metric": "top1", "score": 0.5}


def test_a_state_that_cannot_be_saved_at_all_is_its_own_error(tmp_path: Path) -> None:
    store = store_of(folder_of(tmp_path))
    store.save(5, {"state": (number for number in range(3))})
    with pytest.raises(TypeError, match="generator"):
        store.wait()


@pytest.mark.parametrize("length", [0, 100_000])
def test_a_state_with_few_tensors_and_many_values(length: int) -> None:
    state: dict[str, Any] = {
        "weight": torch.arange(1000.0),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "values": [*range(length)],
    }
    read = torch.load(BytesIO(serialize(state)), weights_only=True)
    assert torch.equal(read["weight"], state["weight"]) and torch.equal(read["half"], state["half"])
    assert read["values"] == state["values"]


STATE: dict[str, Any] = {
    "tensors": [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.tensor(7, dtype=torch.int64),
        torch.empty(0, 3),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.tensor([True, False]),
        torch.tensor([0.1, -2.0], dtype=torch.bfloat16),
    ],
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 1)}],
    },
    "plain": [None, True, 5, 0.5, "text"],
}


def shared(contents: bytes) -> bytes:
    """The state that this rank gets of these contents of a file, which the first one reads; as such contents."""
    worker = Worker.join(torch.device("cpu"), cpus=1, node="local")
    state = torch.load(BytesIO(contents), weights_only=True) if worker.rank == 0 else None
    return bytes(serialize(worker.state_from_first(state)))


def test_every_rank_gets_the_first_one_s_state() -> None:
    for contents in run_ranks(3, shared, bytes(serialize(STATE))):
        state = torch.load(BytesIO(contents), weights_only=True)
        assert all(map(torch.equal, state["tensors"], STATE["tensors"]))
        assert [each.dtype for each in state["tensors"]] == [each.dtype for each in STATE["tensors"]]
        assert torch.equal(state["optimizer"]["state"][0]["step"], torch.tensor(3.0))
        assert state["optimizer"]["param_groups"] == STATE["optimizer"]["param_groups"]
        assert state["plain"] == STATE["plain"]


def read_of(folder: RunFolder) -> tuple[float, int]:
    """The step of the newest checkpoint's tensors, and how often this process has read a state."""
    read: list[str] = []
    real = RunFolder.read

    def noted(self: RunFolder, file: str) -> bytes:
        read.append(file)
        return real(self, file)

    RunFolder.read = noted  # type: ignore[method-assign]
    state = LocalSession(folder).checkpoints.newest()
    assert state is not None
    return float(state["state"]["model"]["weight"][-1]), sum(Path(file).name == "state.pt" for file in read)


def test_only_the_first_rank_reads(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, 5, 10)
    assert run_ranks(3, read_of, folder) == [(10.0, 1), (10.0, 0), (10.0, 0)]
