"""Checkpoints of one process, with states whose tensors tell their step."""

from typing import Any

import torch

from raydali.run.checkpoints import CheckpointStore
from raydali.run.events import Event, FirstCheckpoint
from raydali.run.folder import RunFolder
from raydali.training.worker import Worker


class Rows(list[dict[str, Any]]):
    """Collects the rows of events, but for the first checkpoint's, which every run has."""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, FirstCheckpoint):
            self.append(event.row())


def store_of(folder: RunFolder, rows: Rows | None = None) -> CheckpointStore:
    worker = Worker(rank=0, world_size=1, device=torch.device("cpu"), cpus=1, node="local")
    return CheckpointStore(folder, worker, Rows() if rows is None else rows)


def state_of(step: int, size: int = 1000) -> dict[str, Any]:
    return {"state": {"model": {"weight": torch.full((size,), float(step))}}, "step": step}


def save(folder: RunFolder, *steps: int) -> None:
    store = store_of(folder)
    for step in steps:
        store.save(step, state_of(step))
    store.finish()


def newest(folder: RunFolder, rows: Rows | None = None) -> int:
    """Its step; its tensors are those of that step."""
    state = store_of(folder, rows).newest()
    assert state is not None
    weight = state["state"]["model"]["weight"]
    assert torch.equal(weight, torch.full((len(weight),), float(state["step"])))
    return int(state["step"])
