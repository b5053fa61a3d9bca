"""Sharded checkpoints: each rank writes its part, and any number of ranks reads them."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raydali.errors import DivergedError, StorageError
from raydali.run.checkpoints import CheckpointStore
from raydali.run.find import name_of
from raydali.run.folder import RunFolder
from raydali.run.model_file import BEST, BestWeights
from raydali.training.checkpoint_file import Snapshots, sharded_like
from raydali.training.checkpoint_parts import split
from raydali.training.optim import load_optimizer
from raydali.training.sharding import Sharding
from raydali.training.worker import Worker
from tests.support.checkpoint_stores import Rows, store_of
from tests.support.ranks import folder_of, run_ranks

CPU = torch.device("cpu")


def network(seed: int) -> nn.Sequential:
    """Its rows cannot be divided by 2 or 3, and some ranks have none of the last bias."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))


def sharded(folder: RunFolder, seed: int, rows: Rows) -> tuple[nn.Module, CheckpointStore]:
    worker = Worker.join(CPU, cpus=1, node="local")
    store = CheckpointStore(folder, worker, rows)
    store.sharding = Sharding(worker, worker.world_size, torch.float32, several=False)
    store.sharding.shard(model := network(seed))
    return model, store


def save_rank(folder: RunFolder) -> None:
    """Save the network of seed 1 as step 5, and that of seed 2 as step 10."""
    for seed in (1, 2):
        model, store = sharded(folder, seed, Rows())
        marked, rows = split({"model": model.state_dict()})
        copy = Snapshots(CPU).take({"state": marked, "rows": rows}).state
        store.save(5 * seed, {"state": copy["state"]}, rows=copy["rows"])
        store.finish()


def load_rank(folder: RunFolder) -> tuple[bool, list[dict[str, Any]]]:
    """Whether the newest usable checkpoint has the weights of seed 2, otherwise those of 1; and the events."""
    rows = Rows()
    model, store = sharded(folder, 3, rows)
    state = store.newest()
    assert state is not None
    now = model.state_dict()
    model.load_state_dict({name: sharded_like(now[name], value) for name, value in state["state"]["model"].items()})
    weights = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in model.state_dict().items()
    }
    equal = [
        all(torch.equal(weights[name], value) for name, value in network(seed).state_dict().items()) for seed in (1, 2)
    ]
    assert equal.count(True) == 1
    return equal[1], [*rows]


def test_each_rank_writes_its_part_and_any_number_of_ranks_reads_them(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    run_ranks(2, save_rank, folder)
    files = ["manifest.json", "part_00000.pt", "part_00001.pt", "state.pt"]
    assert folder.files(name_of(10)) == files
    manifest = folder.read_json(f"{name_of(10)}/manifest.json")
    assert manifest["format"] == 3 and [*sorted(manifest["files"])] == files[1:]
    for world_size in (1, 3):
        assert all(second for second, _ in run_ranks(world_size, load_rank, folder))
    state = store_of(folder).newest()  # whole
    assert state is not None
    for name, tensor in network(2).state_dict().items():
        assert torch.equal(state["state"]["model"][name], tensor)


def spoiled_rank(folder: RunFolder) -> None:
    _, store = sharded(folder, 1, Rows())

    def check() -> None:
        if store.sharding is not None and store.sharding.rank == 1:
            raise DivergedError("rows of rank 1 are not finite")

    best = BestWeights({"weight": torch.ones(3)}, 1, "top1", 0.5)
    store.save(5, {"state": {}}, best=best, before_writing=check)
    with suppress(DivergedError, StorageError):
        store.wait()


def test_best_weights_are_kept_until_all_ranks_have_finite_ones(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    run_ranks(2, spoiled_rank, folder)
    assert not folder.exists(BEST) and not folder.exists(f"{name_of(5)}/manifest.json")


def momenta_of_a_whole_run() -> None:
    worker, model = Worker.join(CPU, cpus=1, node="local"), network(1)
    of_whole = torch.optim.SGD(network(1).parameters(), 0.1, momentum=0.9)
    for parameter in of_whole.param_groups[0]["params"]:
        parameter.grad = torch.randn_like(parameter)
    of_whole.step()
    Sharding(worker, worker.world_size, torch.float32, several=False).shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    load_optimizer(optimizer, of_whole.state_dict())
    for parameter, whole in zip(model.parameters(), of_whole.param_groups[0]["params"], strict=True):
        momentum, expected = optimizer.state[parameter]["momentum_buffer"], of_whole.state[whole]["momentum_buffer"]
        assert torch.equal(momentum.full_tensor(), expected)
        rows = momentum.to_local()
        assert rows.untyped_storage().nbytes() == rows.nbytes, "the rest of the momenta is freed"
    weight = next(model.parameters())
    for other in (torch.ones(7, 1), torch.ones(5, 3), torch.tensor(1.0), 1.0):  # of another shape
        assert sharded_like(weight, other) is other


def test_a_whole_run_goes_on_with_shards_of_its_momenta() -> None:
    run_ranks(2, momenta_of_a_whole_run)


def test_a_checkpoint_that_lacks_a_part_is_not_used(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    run_ranks(2, save_rank, folder)
    part = f"{name_of(10)}/part_00001.pt"
    contents = folder.read(part)
    changed = bytes([*contents[:-1], contents[-1] ^ 1])
    folder.write(part, changed)
    with pytest.raises(AssertionError, match=r"cannot be used \(part_00001.pt .* SHA-256 differs\): delete it"):
        run_ranks(2, load_rank, folder)
    state = store_of(folder, rows := Rows()).newest()  # who reads all of it sees at once that it is broken
    assert state is not None and "SHA-256" in rows[0]["reason"]
    folder.rename(f"{name_of(10)}/refused.json", f"{name_of(10)}/manifest.json")
    folder.remove(part)
    (second, rows_of_first), (also_second, _) = run_ranks(2, load_rank, folder)
    assert not second and not also_second
    assert rows_of_first[0]["event"] == "bad checkpoint" and "part_00001.pt is missing" in rows_of_first[0]["reason"]
