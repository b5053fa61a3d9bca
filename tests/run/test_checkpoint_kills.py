"""SIGKILL at every file operation of saving a checkpoint: the newest is whole, old or new."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST, BestWeights
from tests.support import checkpoint_stores
from tests.support.checkpoint_stores import Rows, state_of, store_of
from tests.support.ranks import context, folder_of


def save(folder: RunFolder, steps: range, size: int) -> None:
    store = store_of(folder)
    for step in steps:
        state = state_of(step, size)
        store.save(step, state, best=BestWeights(state["state"]["model"], step, "top1", 0.5))
    store.finish()


def newest(folder: RunFolder) -> int:
    """The step of the newest checkpoint, which is whole; nothing broken was met on the way to it."""
    rows = Rows()
    step = checkpoint_stores.newest(folder, rows)
    assert rows == []
    return step


def save_and_be_killed(storage: str, steps: range, size: int, at: int) -> None:
    """Save, but for the operation number `at` on files of the run, before which SIGKILL comes."""
    left = at

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:  # Python's own opens, renames, new folders, removals
        if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(arguments[0]).startswith(storage):
            count()

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            count()
            return function(*arguments)

        return call

    sys.addaudithook(audit)
    os.fsync = counted(os.fsync)
    for name in ("remove", "remove_folder"):  # pyarrow's
        setattr(RunFolder, name, counted(getattr(RunFolder, name)))
    save(RunFolder(storage, "run"), steps, size)


def test_a_kill_before_each_operation_on_files(tmp_path: Path) -> None:
    whole = folder_of(tmp_path, "whole")
    save(whole, range(1, 4), 1000)
    found, at, code = [], 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        at += 1
        storage = tmp_path / str(at)
        shutil.copytree(whole.path(), storage / "run")
        process = context.Process(target=save_and_be_killed, args=(str(storage), range(4, 5), 1000, at))
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL)
        code = process.exitcode
        folder = RunFolder(str(storage), "run")
        found.append(newest(folder))
        # The best weights are whole, too, and another start goes on from here.
        weight = safetensors.torch.load(folder.read(BEST))["weight"]
        assert torch.equal(weight, torch.full((1000,), float(weight[0])))
        save(folder, range(found[-1] + 1, found[-1] + 2), 1000)
        assert newest(folder) == found[-1] + 1
        assert sum(name.startswith("checkpoint") for name in folder.folders()) == 3
        shutil.rmtree(storage)
    assert at > 20 and found == sorted(found) and set(found) == {3, 4}
