"""A ceiling measured on a busy machine is void, said so, and measured again amid the run, which knows nothing of it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from jobs.imagenet import Config, train
from raydali.launch.worker.run_ceiling import RunCeiling
from raydali.measure import ceiling
from raydali.run.events import CeilingMeasured, Rehearsed
from raydali.run.folder import RunFolder
from raydali.run.messages import Message, Note
from raydali.train import warmup
from raydali.train.precision import Precision
from raydali.train.warmup import warm_up
from raydali.train.worker import Worker
from tests.support.digits import SHORT, digits_data
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
        session = LocalSession(folder)
        train(replace(CONFIG, ceiling=measures), digits_data(), session)
        session.finish()
    state = session.latest()
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


KEPT = replace(SHORT, epochs=1, ceiling=True, trace_samples=False, name="run")


def trained(storage: Path, name: str, config: Config, monkeypatch: pytest.MonkeyPatch, disproves: bool = False) -> Any:
    """The event of the warm-up and the notes, of a command on a node whose cache is in the storage."""
    monkeypatch.setattr(ceiling, "MAX_FOREIGN", inf)
    monkeypatch.setattr(ceiling, "VOID_ABOVE", 0.0 if disproves else inf)
    session = LocalSession(folder_of(storage, name), node_cache=storage / "cache")
    train(config, digits_data(), session)
    (event,) = [message for message in session.messages if type(message) is Rehearsed]
    return event, " ".join(message.text for message in session.messages if isinstance(message, Note))


@pytest.mark.slow
def test_a_second_command_on_the_node_takes_the_ceiling_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.time()
    first, said = trained(tmp_path, "first", KEPT, monkeypatch)
    assert first.ceiling_measured_at is None and "kept" not in said
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    second, said = trained(tmp_path, "second", replace(KEPT, seed=1), monkeypatch)
    assert second.ceiling_images_per_second == first.ceiling_images_per_second
    assert began - 1 < second.ceiling_measured_at < time.time() and "kept from" in said and "measuring" not in said
    rows = RunFolder(str(tmp_path), "second").rows("epochs.jsonl")
    assert [row["ceiling_images_per_second"] for row in rows] == [first.ceiling_images_per_second]
    other, _ = trained(tmp_path, "other", replace(KEPT, batch_size=32), monkeypatch)
    assert other.ceiling_measured_at is None  # other conditions
    old = json.loads(file.read_text())
    file.write_text(json.dumps(old | {"time": old["time"] - 2 * 24 * 3600}))
    third, _ = trained(tmp_path, "third", KEPT, monkeypatch)
    assert third.ceiling_measured_at is None and json.loads(file.read_text())["time"] > old["time"]


@pytest.mark.slow
def test_a_kept_ceiling_that_an_epoch_disproves_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path, "first", KEPT, monkeypatch)
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    (config := json.loads(file.read_text()))["images_per_second"] = 1.0
    file.write_text(json.dumps(config))
    _, said = trained(tmp_path, "second", replace(KEPT, epochs=2), monkeypatch, disproves=True)
    assert "kept from" in said and "is void" in said
    assert not file.exists() or json.loads(file.read_text())["images_per_second"] > 1


def _begun_twice(folder: RunFolder, caches: Path) -> tuple[list[bool], float]:
    session = LocalSession(folder)
    session.node_cache = caches / str(session.worker.rank)
    asked: list[bool] = []

    def warm_up(_: int, measures: bool) -> Generator[Any, None, ceiling.Ceiling]:
        asked.append(measures)
        yield
        return ceiling.Ceiling(100.0 if measures else None)

    state: Any = SimpleNamespace(ceiling=None, flops_per_image=None)
    of_run = RunCeiling(session, state, warm_up, {"batch_size": "64"})
    for _ in range(2):
        list(of_run.begin(1, measures=True, known=of_run.find("images of 32 pixels"), what=""))
    return asked, state.ceiling


def test_all_ranks_take_the_ceiling_that_rank_0_has_kept(tmp_path: Path) -> None:
    results = run_ranks(2, _begun_twice, folder_of(tmp_path), tmp_path / "caches")
    assert results == [([True, False], 100.0)] * 2
    assert [path.name for path in (tmp_path / "caches").iterdir()] == ["0"]


def _doubted(folder: RunFolder) -> list[bool]:
    """Whether this rank measures after each of five epochs; rank 1 has replaced another one after the first start."""
    session, asked = LocalSession(folder), list[bool]()

    def warm_up(_: int, _measures: bool) -> Generator[Any, None, ceiling.Ceiling]:
        yield
        return ceiling.Ceiling(None, "the machine was busy", void=True)

    state: Any = SimpleNamespace(ceiling=None, flops_per_image=None)
    of_run = RunCeiling(session, state, warm_up, {})
    if session.worker.rank == 0:
        alone = replace(session.worker, world_size=1)
        session.worker, together = alone, session.worker
        list(of_run.begin(1, measures=True, known=of_run.find(""), what=""))
        session.worker = together
    for _ in range(5):
        asked.append(bool([*of_run.doubt({})]))
    return asked


def test_ranks_that_came_later_measure_again_with_the_others(tmp_path: Path) -> None:
    assert run_ranks(2, _doubted, folder_of(tmp_path)) == [[True] * 3 + [False] * 2] * 2


def rehearsed() -> ceiling.Ceiling:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(10):
            model(torch.ones(512, 64)).sum().backward()
        optimizer.step()

    worker, precision = Worker.join(CPU, cpus=1, node="here"), Precision("fp32", CPU)
    return take_all(
        warm_up(lambda: step, [model], optimizer, precision, worker, steps=1, images=1, measures_ceiling=True)
    )


def test_of_steps_that_take_too_long_none_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "MAX_SECONDS", 0.0)
    measured = rehearsed()
    assert measured.images_per_second is None and not measured.void and "a step takes" in measured.why


def test_it_is_void_beside_processes_that_take_the_cores() -> None:
    # They end by themselves if this process is killed, or its timeout comes before the `finally` below.
    code = "import time\nend = time.monotonic() + 60\nprint(flush=True)\nwhile time.monotonic() < end: pass"
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
