"""Warm-up steps leave no trace. A ceiling of a busy machine is void, and measured again amid the run."""

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import VisionTransformer

from jobs.imagenet import train
from raydali.host.hardware import PrecisionName
from raydali.launch.worker import ceiling, rehearsal
from raydali.launch.worker.ceiling import MAX_STEPS, MIN_STEPS, Ceiling, RunCeiling, disturbed, steps_to_measure
from raydali.launch.worker.rehearsal import undone, warm_up, warm_up_steps
from raydali.measure import records
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.folder import RunFolder
from raydali.run.messages import Message, Note
from raydali.training.cuda_graphs import WARM_UP_STEPS
from raydali.training.forward_backward import WARM_UP_STEPS_OF_DDP, ForwardBackward, Precision
from raydali.training.models.small_images import digits_network
from raydali.training.worker import Worker
from tests.support.digits import SHORT, digits_data
from tests.support.job_ranks import undisturbed
from tests.support.messages import mentions
from tests.support.rank_records import rank
from tests.support.ranks import CPU, LocalSession, folder_of, run_ranks
from tests.support.warm_up_steps import take_all

CONFIG = replace(SHORT, learning_rate=0.01, epochs=3, mixup=0.2, ema_decay=0.9, name="run")


def slowed_at_first(folder: RunFolder, measures: bool) -> tuple[dict[str, Any], list[Message]]:
    """The weights and the messages; the first ceiling is measured on a machine that is 100 times as slow."""
    measured: list[float] = []

    def slow(*args: Any, **settings: Any) -> Generator[Any, None, Ceiling]:
        found = yield from warm_up(*args, **settings)
        if found.images_per_second is None:
            return found
        measured.append(found.images_per_second / (1 if measured else 100))
        return replace(found, images_per_second=measured[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rehearsal, "warm_up", slow)
        patch.setattr(records, "VOID_ABOVE", 5.0)  # a load may come and go
        patch.setattr(ceiling, "MAX_FOREIGN", 2.0)
        session = LocalSession(folder)
        train(replace(CONFIG, ceiling=measures), digits_data(), session)
        session.checkpoints.finish()
    state = session.checkpoints.newest()
    assert state is not None
    optimizer = {
        f"momentum {key}": each["momentum_buffer"] for key, each in state["state"]["optimizer"]["state"].items()
    }
    tensors = {**state["state"]["model"], **optimizer, **{f"ema {k}": v for k, v in state["state"]["ema"].items()}}
    return {name: tensor.numpy() for name, tensor in tensors.items()}, session.messages


@pytest.mark.slow
def test_it_is_measured_again_and_leaves_no_trace(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "measured")
    (weights, messages), (_, of_other) = run_ranks(2, slowed_at_first, folder, True)
    undisturbed, _ = run_ranks(2, slowed_at_first, folder_of(tmp_path, "not"), False)[0]
    for name, tensor in weights.items():
        np.testing.assert_array_equal(tensor, undisturbed[name], err_msg=name)
    rows = folder.rows("epochs.jsonl")
    assert rows[0]["ceiling_images_per_second"] is None and rows[0]["of_ceiling"] is None
    assert rows[0]["flops_per_image"] is None and rows[0]["mfu"] is None  # on a CPU
    assert "ceiling is not known" in rows[0]["verdict"] or "step-bound" not in rows[0]["verdict"]
    notes = [message.text for message in messages if isinstance(message, Note)]
    assert "measuring the ceiling" in notes[0] and "void" in notes[1] and len(notes) == 2
    again = [message for message in messages if isinstance(message, CeilingMeasured)]
    assert again and again[0].ceiling_images_per_second
    assert rows[1]["ceiling_images_per_second"] == again[0].ceiling_images_per_second > 0
    assert 0 < rows[1]["of_ceiling"] <= 5
    assert not [message for message in of_other if isinstance(message, Note | Rehearsed)]


def beside(load: float) -> dict[str, Any]:
    """The record of an epoch on a CPU without idle cores, of which other processes used this share."""
    times: dict[str, Any] = {"cpu_seconds": 10 * (1 - load), "host_busy_seconds": 10.0, "host_idle_seconds": 0.0}
    return {"ranks": [rank("g", size=1, device="cpu", **times)], "images_per_second": 100.0}


ENDLESS = [0.2] * 5
CASES = {
    (0.4, 0.4, 0.4): [True, False, False],
    (0.0, 0.0): [True, False],
    (0.6, 0.9, 0.4, 0.3, 0.15, 0.1, 0.01): [False, False, True, False, True, False, True],
}
"""Shares of the CPU time that others use in each epoch, and whether the ceiling is measured after it, in vain."""


def _doubted(folder: RunFolder) -> list[list[bool]]:
    """Return whether this rank measures after each epoch of CASES, and of ENDLESS, in which no measurement is void.

    Rank 1 has replaced another one after the first measurement.
    """
    session, found = LocalSession(folder), list[list[bool]]()

    busy, now = Ceiling(why="the machine was busy", void=True), time.perf_counter()

    def measures_after(of_run: RunCeiling, load: float, measured: Ceiling) -> bool:
        if doubts := of_run.doubts(beside(load)):
            of_run.take(measured, CeilingMeasured, now, again=True)
        return doubts

    for loads in (*CASES, ENDLESS):
        state: Any = SimpleNamespace(ceiling=None, flops_per_image=None, gpu_busy=None)
        of_run = RunCeiling(session, state)
        if session.worker.rank == 0:
            alone = replace(session.worker, world_size=1)
            session.worker, together = alone, session.worker
            of_run.take(busy, Rehearsed, now)
            session.worker = together
        found.append([measures_after(of_run, load, Ceiling() if loads is ENDLESS else busy) for load in loads])
    return found


def test_it_is_measured_again_only_once_the_load_is_lower(tmp_path: Path) -> None:
    assert run_ranks(2, _doubted, folder_of(tmp_path)) == [[*CASES.values(), [True] * 3 + [False] * 2]] * 2


def rehearsed(step: Callable[[], None] | None = None, images: int = 1) -> Ceiling:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train() -> None:
        for _ in range(10):
            model(torch.ones(512, 64)).sum().backward()
        optimizer.step()

    worker, precision = Worker.join(CPU, cpus=1, node="here"), Precision("fp32", CPU)
    facts: dict[str, Any] = {"differentiated": [], "steps": 1, "images": images, "measures": True}
    return take_all(warm_up(lambda: step or train, undone([model], optimizer, precision), worker, **facts))


class Slow:
    """A machine on which each step takes so many seconds, and steps on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step_seconds: float) -> None:
        self.seconds, self.now, self.steps = step_seconds, 0.0, 0
        monkeypatch.setattr("raydali.launch.worker.rehearsal.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("raydali.launch.worker.ceiling.MAX_FOREIGN", 2.0)

    def step(self) -> None:
        self.steps += 1
        self.now += self.seconds


def test_the_ceiling_is_images_over_the_time_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, 0.05)
    assert rehearsed(slow.step, images=10).images_per_second == pytest.approx(200)
    assert slow.steps == 1 + 1 + 30


@pytest.mark.parametrize(("seconds", "steps"), [(1e-6, MAX_STEPS), (1.0, MIN_STEPS), (4.0, 2), (30.0, 1)])
def test_steps_are_neither_too_many_nor_too_few(seconds: float, steps: int) -> None:
    assert steps_to_measure(seconds) == steps


def test_of_steps_that_take_too_long_none_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MAX_SECONDS", 0.0)
    measured = rehearsed()
    assert measured.images_per_second is None and not measured.void and "a step takes" in measured.why


def test_a_machine_is_busy_if_others_use_all_cores() -> None:
    def of_rank(own: float, busy: float, idle: float, node: str = "a") -> dict[str, Any]:
        return {"node": node, "cpu_seconds": own, "host_busy_seconds": busy, "host_idle_seconds": idle}

    assert mentions(disturbed([of_rank(0.8, 2.0, 0.0)]), "60%")
    assert disturbed([of_rank(0.8, 2.0, 0.0), of_rank(0.6, 2.0, 0.0)]) == ""
    assert disturbed([of_rank(0.8, 2.0, 2.0)]) == ""
    assert "node b" in disturbed([of_rank(2.0, 2.0, 0.0), of_rank(0.5, 2.0, 0.0, "b")])
    assert disturbed([dict.fromkeys(("cpu_seconds", "host_busy_seconds", "host_idle_seconds")) | {"node": "a"}]) == ""


def test_it_is_void_beside_processes_that_take_the_cores() -> None:
    # They end by themselves with this process, which may be killed before the `finally` below.
    code = "import os\nparent = os.getppid()\nprint(flush=True)\nwhile os.getppid() == parent: pass"
    burners = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        for burner in burners:
            assert burner.stdout is not None and burner.stdout.readline() == b"\n"
        measured = rehearsed()
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert measured.void and measured.images_per_second is None
    assert "%" in measured.why


# ---------------------------------------------------------------------------------------------------------------------
# Warm-up steps


def network() -> nn.Module:
    torch.manual_seed(0)
    return digits_network(10)


def forward_and_backward(model: nn.Module, worker: Worker, precision: Precision, **settings: Any) -> ForwardBackward:
    def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), labels)

    return ForwardBackward(model, loss, worker, precision, **settings)


def warm_up_steps_of_rank(precision_name: PrecisionName, overlap: bool) -> int:
    worker, model = Worker.join(CPU, cpus=1, node=""), network()
    precision = Precision(precision_name, CPU)
    forward_backward = forward_and_backward(model, worker, precision, micro_batches=2, overlap=overlap)
    return warm_up_steps([forward_backward], torch.device("cuda"))


def test_only_ddp_and_fp16_need_many_warm_up_steps() -> None:
    assert warm_up_steps_of_rank("bf16", True) == warm_up_steps([], torch.device("cuda")) == WARM_UP_STEPS + 2
    assert warm_up_steps_of_rank("fp16", True) == WARM_UP_STEPS_OF_DDP + 2
    assert run_ranks(2, warm_up_steps_of_rank, "bf16", True) == [WARM_UP_STEPS_OF_DDP + 2] * 2
    assert run_ranks(2, warm_up_steps_of_rank, "bf16", False) == [WARM_UP_STEPS + 2] * 2


def rehearsal_of_rank(precision_name: PrecisionName, measures: bool) -> tuple[bool, float | None, int]:
    """Return whether everything was as before, the ceiling, and how many steps were taken."""
    worker = Worker.join(CPU, cpus=1, node="")
    model, average = network(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    precision = Precision(precision_name, CPU)
    forward_backward = forward_and_backward(model, worker, precision, micro_batches=worker.world_size)
    images, labels, steps = torch.rand(4, 3, 32, 32), torch.arange(4), 0

    def step() -> None:
        nonlocal steps
        steps += 1
        forward_backward(images + worker.rank, labels)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for mean, now in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
                mean.copy_(now)
            next(average.parameters()).add_(1)

    def everything() -> list[Any]:
        tensors = [t.detach().clone() for m in (model, average) for t in m.state_dict().values()]
        return [tensors, copy.deepcopy(optimizer.state_dict()), precision.scaler.state_dict()]

    step()  # momenta that are not zero
    steps, before = 0, everything()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    modules = [model, average]
    with undisturbed():
        ceiling = take_all(
            warm_up(
                lambda: step,
                undone(modules, optimizer, precision),
                worker,
                differentiated=[forward_backward],
                steps=1,
                images=4,
                measures=measures,
            )
        )
    after = everything()
    same = all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    same &= str(before[1:]) == str(after[1:])
    same &= places == [parameter.data_ptr() for parameter in model.parameters()]
    same &= all(parameter.grad is None for parameter in model.parameters())
    return same, ceiling.images_per_second, steps


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(each, marks=pytest.mark.slow) for each in ("bf16", "fp16"))]
)
def test_a_rehearsal_leaves_no_trace(precision: PrecisionName) -> None:
    same, ceiling, steps = rehearsal_of_rank(precision, True)
    assert same and ceiling is not None and ceiling > 0 and steps >= 1 + 1 + 3


def test_steps_have_gradients_as_in_training_though_the_head_starts_at_zero() -> None:
    model = VisionTransformer(16, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=5)
    optimizer, head = torch.optim.SGD(model.parameters(), lr=0.0), model.heads.get_submodule("head")
    assert not any(parameter.any() for parameter in head.parameters())
    generator = torch.get_rng_state()
    with undone([model], optimizer, Precision("fp32", CPU)):
        nn.functional.cross_entropy(model(torch.ones(4, 3, 16, 16)), torch.arange(4)).backward()
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())
    assert not any(parameter.any() for parameter in head.parameters())
    assert torch.equal(torch.get_rng_state(), generator)


def test_without_a_ceiling_a_rehearsal_on_the_cpu_is_one_step() -> None:
    assert rehearsal_of_rank("fp32", False) == (True, None, 1)


def test_ranks_rehearse_equal_steps_and_agree_on_the_ceiling() -> None:
    results = run_ranks(2, rehearsal_of_rank, "fp32", True)
    assert all(same for same, _, _ in results)
    assert len({(ceiling, steps) for _, ceiling, steps in results}) == 1
