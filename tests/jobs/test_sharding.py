"""Sharded training, on plain gloo processes: in float64 it has the losses and weights of unsharded training."""

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torchvision.models import VisionTransformer

from jobs.imagenet import Data, train
from raydali.errors import UsageError
from raydali.measure.memory import OUT_OF_MEMORY
from raydali.run.events import CheckpointFailed
from raydali.run.find import name_of, newest_step
from raydali.run.folder import RunFolder
from raydali.run.messages import Message
from raydali.training.forward_backward import ForwardBackward
from tests.jobs.test_world_size import Run, distance
from tests.support.digits import SHORT, few_digits
from tests.support.job_ranks import train_rank_in_double
from tests.support.ranks import LocalSession, Stopped, folder_of, run_ranks
from tests.support.traces import assert_whole


def small_transformer(num_classes: int) -> VisionTransformer:
    """Two blocks; neither their matrices nor the classes can be divided by 3."""
    return VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=20, num_classes=num_classes)


VIT = replace(
    SHORT,
    model=f"{__name__}:small_transformer",
    optimizer="adamw",
    learning_rate=1e-3,
    clip_grad=0.5,
    ema_decay=0.9,
    epochs=1,
    checkpoint_every=1,
)
"""Four steps, and a checkpoint after each."""
in_double = partial(train_rank_in_double, train)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return few_digits(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="module")
def alone(digits: Data, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Run]:
    """Folder, weights and epoch records of the unsharded run on one worker."""
    folder = folder_of(tmp_path_factory.mktemp("alone"))
    return folder, (run_ranks(1, in_double, VIT, digits, folder)[0], folder.rows("epochs.jsonl"))


def assert_equal(folder: RunFolder, weights: dict[str, np.ndarray], expected: Run) -> None:
    for row, other in zip(expected[1], folder.rows("epochs.jsonl"), strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-9)
        assert other["validation"]["loss"] == pytest.approx(row["validation"]["loss"], rel=1e-6)  # float32
    assert distance(weights, expected[0]) < 1e-9


@pytest.mark.parametrize(
    ("world_size", "shard", "batch_size"), [(2, "all", 48), pytest.param(4, 2, 16, marks=pytest.mark.slow)]
)
def test_losses_and_weights_are_those_of_one_worker(
    tmp_path: Path, digits: Data, alone: tuple[RunFolder, Run], world_size: int, shard: Any, batch_size: int
) -> None:
    """With a micro-batch on each rank, and with 2, 2, 1 and 1; clipped, with a moving average.

    Of two equal copies, one is saved.
    """
    folder = folder_of(tmp_path)
    config = replace(VIT, shard=shard, batch_size=batch_size, activation_checkpointing=world_size == 2)
    weights = run_ranks(world_size, in_double, config, digits, folder)[0]
    assert_equal(folder, weights, alone[1])
    assert all(rank["exchange_seconds"] is not None for rank in folder.rows("epochs.jsonl")[0]["ranks"])
    assert folder.files(name_of(4)) == ["manifest.json", "part_00000.pt", "part_00001.pt", "state.pt"]
    best = "best/model.safetensors"
    for name, tensor in load(folder.read(best)).items():
        torch.testing.assert_close(tensor, load(alone[0].read(best))[name], rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_network_without_blocks_is_gathered_as_a_whole_and_its_batchnorm_is_as_unsharded(
    tmp_path: Path, digits: Data
) -> None:
    config = replace(SHORT, learning_rate=0.01, epochs=1)
    folders = [folder_of(tmp_path, name) for name in ("whole", "sharded")]
    expected = run_ranks(1, in_double, config, digits, folders[0])[0], folders[0].rows("epochs.jsonl")
    weights = run_ranks(3, in_double, replace(config, shard="all"), digits, folders[1])[0]
    assert any("running_var" in name for name in weights)
    assert_equal(folders[1], weights, expected)


def test_a_resume_goes_on_with_the_same_weights_and_momenta(
    tmp_path: Path, digits: Data, alone: tuple[RunFolder, Run]
) -> None:
    """From a whole checkpoint to 3 workers, from their shards to 2, and from these to an unsharded worker."""
    folder = folder_of(tmp_path)
    cut: list[tuple[int, Any, int]] = [(1, None, 2), (3, "all", 3), (2, 2, 4)]
    for workers, shard, stop_at in cut:
        with pytest.raises(Stopped):
            run_ranks(workers, in_double, replace(VIT, shard=shard), digits, folder, stop_at)
    weights = run_ranks(1, in_double, VIT, digits, folder)[0]
    assert_equal(folder, weights, alone[1])
    assert_whole(folder, VIT.stream(len(digits.train)))


def failing_rank(
    step: int, fails: Callable[[RunFolder, str], None], *arguments: Any
) -> tuple[dict[str, np.ndarray], list[dict[str, Any]]]:
    """Train; where rank 1 writes its part of the checkpoint of a step for the first time, something happens.

    Returns:
        The weights, and the rows about failed checkpoints.
    """
    write, failed, rows = RunFolder.write, list[str](), list[dict[str, Any]]()

    def failing(folder: RunFolder, file: str, contents: bytes | memoryview) -> None:
        if file == f"{name_of(step)}/part_00001.pt" and not failed:
            failed.append(file)
            fails(folder, file)
        write(folder, file, contents)

    def emit(_: LocalSession, message: Message) -> None:
        if isinstance(message, CheckpointFailed):
            rows.append(message.row())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "write", failing)
        patch.setattr(LocalSession, "emit", emit)
        return in_double(*arguments), rows


def die(folder: RunFolder, file: str) -> None:
    Path(folder.path(file)).parent.mkdir(exist_ok=True)
    Path(folder.path(file)).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def fill_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(
    tmp_path: Path, digits: Data, alone: tuple[RunFolder, Run]
) -> None:
    folder, config = folder_of(tmp_path), replace(VIT, shard="all")
    with pytest.raises(AssertionError, match="rank 0"):  # it has lost its connection
        run_ranks(2, failing_rank, 2, die, config, digits, folder)
    assert newest_step(folder) == 1
    weights = run_ranks(3, in_double, config, digits, folder)[0]
    assert_equal(folder, weights, alone[1])
    assert_whole(folder, VIT.stream(len(digits.train)))


def test_a_full_disk_on_one_node_costs_that_checkpoint_only(
    tmp_path: Path, digits: Data, alone: tuple[RunFolder, Run]
) -> None:
    folder, config = folder_of(tmp_path), replace(VIT, shard="all")
    weights, (failed,) = run_ranks(2, failing_rank, 2, fill_disk, config, digits, folder)[0]
    assert_equal(folder, weights, alone[1])
    assert (failed["step"], failed["reason"]) == (2, "rank 1: [Errno 28] No space left on device")
    assert not folder.exists(f"{name_of(2)}/state.pt")


def refused(*arguments: Any) -> str:
    """Train on a device whose memory is full at the first step; return the error."""

    def too_large(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForwardBackward, "__call__", too_large)
        try:
            in_double(*arguments)
        except UsageError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(("workers", "now"), [(2, "give a smaller one"), (1, "no smaller one was found that fits")])
def test_a_micro_batch_that_is_too_large_names_the_shards(tmp_path: Path, digits: Data, workers: int, now: str) -> None:
    """All ranks say so, and none waits for another one to try smaller sizes."""
    config = replace(VIT, shard="all", batch_size=1)
    errors = run_ranks(workers, refused, config, digits, folder_of(tmp_path))
    instead = f"{now}, or try --activation-checkpointing or more workers, which have smaller shards"
    assert errors == [f"--batch-size 1 {OUT_OF_MEMORY}: {instead}"] * workers
