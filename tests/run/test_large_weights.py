"""Best weights that are too large for one file are in parts, with an index."""

import pytest
import safetensors.torch
import torch
from torch import nn

from raydali.errors import UsageError
from raydali.run import model_file
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST_INDEX, BestWeights, best_file
from raydali.training.weights.reading import read_best
from tests.support.messages import mentioning


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))


def test_large_best_weights_are_written_in_parts(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_file, "PART_BYTES", 100)

    def of_run(file: str) -> bytes | None:
        return folder.read(file) if folder.exists(file) else None

    assert best_file(folder) is None and read_best(of_run, "run") is None
    for epoch in (1, 2):
        state = network(epoch).state_dict()
        BestWeights(state, epoch, "top1", 0.5).write(folder)
    assert best_file(folder) == BEST_INDEX
    index = folder.read_json(BEST_INDEX)
    parts = folder.files("best")
    parts.remove(BEST_INDEX.removeprefix("best/"))
    assert sorted({*index["weight_map"].values()}) == parts and len(parts) > 1
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    for name, file in index["weight_map"].items():
        part = safetensors.torch.load(folder.read(f"best/{file}"))
        assert torch.equal(part[name], state[name])
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 100
    best = read_best(of_run, "run")
    assert best is not None and best[0] == BEST_INDEX
    assert best[2].keys() == state.keys() and all(torch.equal(best[2][name], state[name]) for name in state)
    folder.remove(f"best/{parts[0]}")
    with pytest.raises(UsageError, match=mentioning("missing copy it again")):
        read_best(of_run, "run")
