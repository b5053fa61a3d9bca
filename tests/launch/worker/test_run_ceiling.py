"""A ceiling measured on a busy machine is void, said so, and measured again amid the run, which knows nothing of it."""

import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobs.imagenet import train
from raydali.launch.worker import run_ceiling
from raydali.launch.worker.run_ceiling import RunCeiling
from raydali.measure import ceiling
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.folder import RunFolder
from raydali.run.messages import Message, Note
from raydali.training import warmup
from raydali.training.forward_backward import Precision
from raydali.training.warmup import warm_up
from raydali.training.worker import Worker
from tests.support.digits import SHORT, digits_data
from tests.support.rank_records import rank
from tests.support.ranks import CPU, LocalSession, folder_of, run_ranks
from tests.support.warm_up_steps import take_all

CONFIG = replace(SHORT, learning_rate=0.01, epochs=3, mixup=0.2, ema_decay=0.9, name="run")


def slowed_at_first(folder: RunFolder, measures: bool) -> tuple[dict[str, Any], list[Message]]:
    """The weights and the messages; the first ceiling is measured on a machine that is 100 times as slow."""
    measure = ceiling.ceiling_images_per_second
    measured: list[float] = []

    def slow(*args: Any) -> Generator[Any, None, float]:
        measured.append((yield from measure(*args)) / (1 if measured else 100))
        return measured[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warmup, "ceiling_images_per_second", slow)
        patch.setattr(ceiling, "VOID_ABOVE", 5.0)  # a load may come and go
        patch.setattr(ceiling, "MAX_FOREIGN", 2.0)
        patch.setattr(run_ceiling, "MAX_FOREIGN", 2.0)
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


AT_START = 3
"""Number of warm-up steps before the first measurement."""


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
    """Whether this rank measures after each epoch of CASES, and of ENDLESS, in which no measurement is void.

    Rank 1 has replaced another one after the first measurement.
    """
    session, found = LocalSession(folder), list[list[bool]]()

    def warm_up(steps: int, _measures: bool) -> Generator[Any, None, ceiling.Ceiling]:
        yield
        return ceiling.Ceiling(None, "the machine was busy", void=steps == AT_START or loads is not ENDLESS)

    for loads in (*CASES, ENDLESS):
        state: Any = SimpleNamespace(ceiling=None, flops_per_image=None, gpu_busy=None)
        of_run = RunCeiling(session, state, warm_up)
        if session.worker.rank == 0:
            alone = replace(session.worker, world_size=1)
            session.worker, together = alone, session.worker
            list(of_run.begin(AT_START, measures=True, doing=[], event=Rehearsed))
            session.worker = together
        found.append([bool([*of_run.doubt(beside(load))]) for load in loads])
    return found


def test_it_is_measured_again_only_once_the_load_is_lower(tmp_path: Path) -> None:
    assert run_ranks(2, _doubted, folder_of(tmp_path)) == [[*CASES.values(), [True] * 3 + [False] * 2]] * 2


def rehearsed() -> ceiling.Ceiling:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(10):
            model(torch.ones(512, 64)).sum().backward()
        optimizer.step()

    worker, precision = Worker.join(CPU, cpus=1, node="here"), Precision("fp32", CPU)
    facts: dict[str, Any] = {"differentiated": [], "steps": 1, "images": 1, "measures_ceiling": True}
    return take_all(warm_up(lambda: step, [model], optimizer, precision, worker, **facts))


def test_of_steps_that_take_too_long_none_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "MAX_SECONDS", 0.0)
    measured = rehearsed()
    assert measured.images_per_second is None and not measured.void and "a step takes" in measured.why


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
