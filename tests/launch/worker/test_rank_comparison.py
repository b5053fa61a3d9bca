"""Ranks that differ are found at the next checkpoint, and named where something tells which are wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jobs.imagenet import Config, Data, train
from raydali.errors import DivergedError, NodeError
from raydali.launch.worker import rank_comparison
from raydali.launch.worker.rank_comparison import checksum, majority
from raydali.run.events import RanksDiffer
from raydali.run.find import newest_step
from raydali.run.folder import EVENTS, RunFolder
from raydali.run.messages import Message
from raydali.training.optim import MovingAverage, build_optimizer
from tests.support.digits import SHORT, few_digits, residual_digits
from tests.support.flipped_bits import Where, plant
from tests.support.job_ranks import train_rank
from tests.support.messages import mentions
from tests.support.quick import first_quick
from tests.support.ranks import LocalSession, Stopped, folder_of, run_ranks

CPU = torch.device("cpu")
in_single = partial(train_rank, train)
CONFIG = replace(SHORT, batch_size=8, global_batch_size=48, epochs=1, checkpoint_every=4, trace_samples=False)
"""Nine steps; checkpoints after 4, 8 and 9 of them."""


class RecordingSession(LocalSession):
    """One whose events of ranks are written, as the driver does."""

    def emit(self, message: Message) -> None:
        super().emit(message)
        if isinstance(message, RanksDiffer):
            self.folder.append(EVENTS, message.row())


Plant = Callable[[LocalSession], None]


def outcome(config: Config, data: Data, folder: RunFolder, fault: Plant | None = None) -> tuple[str, str]:
    """The kind and the text of the error that ended the training on a rank; both are empty without one."""
    session = RecordingSession(folder)
    if fault is not None:
        fault(session)
    try:
        train(config, data, session)
        session.checkpoints.finish()
    except (NodeError, RuntimeError, DivergedError) as error:
        if isinstance(error, NodeError):
            session.worker.barrier()  # the others wait for the end of the group
        return type(error).__name__, str(error)
    return "", ""


class Fault:
    """A bit that the last rank flips after a step, once or always."""

    def __init__(self, where: Where, step: int, once: Path | None) -> None:
        self.where, self.step, self.once = where, step, once

    def __call__(self, session: LocalSession) -> None:
        last = session.worker.world_size - 1
        plant(session, rank=last, step=self.step, where=self.where, once=self.once)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return few_digits(tmp_path_factory.mktemp("digits"))


def test_of_three_ranks_the_odd_one_is_named(tmp_path: Path, digits: Data) -> None:
    folder, fault = folder_of(tmp_path), Fault("momentum", 5, tmp_path / "flipped")
    outcomes = run_ranks(3, outcome, CONFIG, digits, folder, fault)
    assert [kind for kind, _ in outcomes] == ["RuntimeError", "RuntimeError", "NodeError"]
    assert all(mentions(text, "rank 2 node local step 8 wrong") for _, text in outcomes)
    (row,) = folder.rows(EVENTS)
    assert (row["step"], row["odd"], len({*row["checksums"][:2]}), newest_step(folder)) == (8, [2], 1, 4)
    assert {*run_ranks(3, outcome, CONFIG, digits, folder, fault)} == {("", "")}
    assert (len(folder.rows(EVENTS)), newest_step(folder)) == (1, 9)


@pytest.mark.parametrize(
    ("where", "step", "told"), [pytest.param("momentum", 5, False, marks=pytest.mark.slow), ("weight", 7, True)]
)
def test_of_two_ranks_one_is_named_if_the_same_steps_tell(
    tmp_path: Path, digits: Data, where: Where, step: int, told: bool
) -> None:
    """After a flip that is not the last thing before a checkpoint, both ranks have got gradients of wrong weights."""
    folder, fault = folder_of(tmp_path), Fault(where, step, tmp_path / "flipped")
    outcomes = run_ranks(2, outcome, CONFIG, digits, folder, fault)
    assert [kind for kind, _ in outcomes] == ["RuntimeError"] * 2
    assert [row["odd"] for row in folder.rows(EVENTS)] == [[]] and newest_step(folder) == 4
    assert {*run_ranks(2, outcome, CONFIG, digits, folder, fault)} == {("", "")}
    assert newest_step(folder) == 9
    _, *found = folder.rows(EVENTS)
    assert [(row["odd"], row["recomputed"]) for row in found] == ([([1], True)] if told else [])
    assert all(mentions(row["text"], "rank 1 step 8 wrong") for row in found)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "why"), [(2, "software"), (3, "device away")])
def test_a_difference_that_comes_back_ends_the_run(tmp_path: Path, digits: Data, world_size: int, why: str) -> None:
    folder, always = folder_of(tmp_path), Fault("weight", 5, None)
    assert "" not in {kind for kind, _ in run_ranks(world_size, outcome, CONFIG, digits, folder, always)}
    outcomes = run_ranks(world_size, outcome, CONFIG, digits, folder, always)
    assert {kind for kind, _ in outcomes} == {"DivergedError"} and newest_step(folder) == 4
    assert all(mentions(text, f"step 8 {why} --no-compare-ranks") for _, text in outcomes)
    if world_size == 2:
        off = replace(CONFIG, compare_ranks=False)
        assert {*run_ranks(world_size, outcome, off, digits, folder, always)} == {("", "")}


@pytest.mark.parametrize(
    ("where", "copies", "again"), [("weight", 2, True), pytest.param("momentum", 3, False, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_of_sharded_copies_a_shard_that_differs_is_named(
    tmp_path: Path, digits: Data, where: Where, copies: int, again: bool
) -> None:
    """The same steps tell which of two copies is wrong, and the majority does of three."""
    folder, fault, last = folder_of(tmp_path), Fault(where, 7, tmp_path / "flipped"), 2 * copies - 1
    config = replace(CONFIG, shard=2, clip_grad=0.1, model="tests.jobs.test_sharding:small_transformer", ema_decay=0.9)
    outcomes = run_ranks(2 * copies, outcome, config, digits, folder, fault)
    assert [kind for kind, _ in outcomes] == ["RuntimeError"] * last + ["RuntimeError" if again else "NodeError"]
    (first,) = folder.rows(EVENTS)
    assert (first["step"], first["odd"], newest_step(folder)) == (8, [] if again else [last], 4)
    shards = [{*first["checksums"][shard::2]} for shard in (0, 1)]
    assert [*map(len, shards)] == [1, 2] and not shards[0] & shards[1]
    assert {*run_ranks(2 * copies, outcome, config, digits, folder, fault)} == {("", "")} and newest_step(folder) == 9
    assert [(row["odd"], row["recomputed"]) for row in folder.rows(EVENTS)[1:]] == [([last], True)] * again


def test_shards_of_one_copy_are_not_compared(tmp_path: Path, digits: Data) -> None:
    config, folder = replace(CONFIG, shard="all"), folder_of(tmp_path)
    assert {*run_ranks(2, outcome, config, digits, folder, Fault("weight", 5, None))} == {("", "")}
    assert not folder.rows(EVENTS) and newest_step(folder) == 9


def on_other_devices(config: Config, data: Data, folder: RunFolder, fault: Plant) -> list[str]:
    session = RecordingSession(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_comparison, "cpu_facts", lambda: {"model name": f"CPU {session.worker.rank}"})
        fault(session)
        train(config, data, session)
    return [str(message) for message in session.messages if "compared" in str(message)]


def test_ranks_with_other_devices_may_differ(tmp_path: Path, digits: Data) -> None:
    folder = folder_of(tmp_path)
    warned, silent = run_ranks(2, on_other_devices, CONFIG, digits, folder, Fault("weight", 1, None))
    assert len(warned) == 1 and not silent and newest_step(folder) == 9 and not folder.rows(EVENTS)


def parts_of(optimizer: str) -> list[Any]:
    """A model after a step in all layouts, its optimizer, its average, and what does not count."""
    torch.manual_seed(0)
    model = residual_digits(10).to(memory_format=torch.channels_last)
    model.append(nn.Linear(10, 3))  # an odd number of values
    model[0].weight.requires_grad_(False)
    options: dict[str, Any] = {"head": {"12.weight"}} if optimizer == "muon" else {}
    optimizing = build_optimizer(optimizer, model, learning_rate=0.1, weight_decay=0.1, **options)  # type: ignore[arg-type]
    average = MovingAverage(model, 0.9)
    model(torch.rand(4, 3, 32, 32)).square().sum().backward()
    optimizing.step()
    average.update_parameters(model)
    return [model, optimizing, average, torch.amp.GradScaler("cpu", enabled=False)]


@first_quick("optimizer", ["sgd", "adamw", "muon", "lamb", "lars"])
def test_each_bit_counts(optimizer: str) -> None:
    parts = parts_of(optimizer)
    model, optimizing, average, _ = parts
    before = int(checksum(parts, CPU))
    assert before == int(checksum(parts_of(optimizer), CPU))
    states = [state for each in optimizing.state.values() for state in each.values() if torch.is_tensor(state)]
    assert len(states) >= len([*model.parameters()]) - 1
    for tensor in [*model.parameters(), *average.module.parameters(), *states]:
        numbers = tensor.detach().view({4: torch.int32, 8: torch.int64}[tensor.itemsize])
        for bit in (0, 13, 31):
            where = tuple(size - 1 for size in tensor.shape)
            numbers[where] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert int(checksum(parts, CPU)) != before
            numbers[where] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert int(checksum(parts, CPU)) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool])
def test_each_dtype_and_layout_counts(dtype: torch.dtype) -> None:
    memory = torch.ones(99).to(dtype)
    for tensor in (memory, memory[1:], memory[::3], memory[:90].view(9, 10).T, memory[3]):
        model, weight = nn.Module(), nn.Parameter(tensor, requires_grad=False)
        model.register_parameter("weight", weight)
        before = int(checksum([model], CPU))
        weight[(-1,) * tensor.dim()] = 0
        assert int(checksum([model], CPU)) != before
        weight[(-1,) * tensor.dim()] = 1


def test_statistics_of_batches_do_not_count() -> None:
    model = residual_digits(10)
    before = int(checksum([model], CPU))
    model(torch.rand(4, 3, 32, 32))
    assert int(checksum([model], CPU)) == before


def test_a_majority_is_more_than_half() -> None:
    assert majority([5, 7, 5]) == majority([7, 5, 5, 5, 6]) == 5
    assert majority([5, 7]) == majority([5, 5, 7, 7]) == majority([1, 2, 3]) is None


SOAKED: list[dict[str, Any]] = [
    {"optimizer": "sgd", "ema_decay": 0.99, "freeze": "^0[.]"},
    {"optimizer": "adamw", "ema_decay": 0.9, "ema_warmup": True, "clip_grad": 0.5, "mixup": 0.2},
    {"optimizer": "muon", "precision": "bf16", "class_sampling": "balanced"},
    {"optimizer": "lamb", "precision": "fp64"},
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("options", SOAKED, ids=lambda options: options["optimizer"])
def test_no_alarm_is_false_in_10000_steps_with_resizes_and_resumes(
    tmp_path: Path, digits: Data, options: dict[str, Any]
) -> None:
    """2,508 steps each; steps after a checkpoint run again, on other numbers of ranks, also with unequal shares."""
    folder = folder_of(tmp_path)
    model = "tests.support.digits:residual_digits"
    config = replace(CONFIG, model=model, epochs=132, global_batch_size=24, validate_every=40, checkpoint_every=12)
    config = replace(config, **options)
    for world_size, stop_at in ((2, 403), (3, 807), (1, 1003), (3, 1211), (2, 1609), (3, 2005)):
        with pytest.raises(Stopped):
            run_ranks(world_size, in_single, config, digits, folder, stop_at, timeout=900)
    run_ranks(2, in_single, config, digits, folder, timeout=900)
    assert newest_step(folder) == 132 * 479 // 24
