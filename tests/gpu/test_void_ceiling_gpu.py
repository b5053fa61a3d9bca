"""A void ceiling is measured again behind an epoch, with the captured step, and the run knows nothing of it."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from jobs.imagenet import DIGITS, train
from raydali.launch.worker import rehearsal
from raydali.launch.worker.ceiling import Ceiling
from raydali.launch.worker.rehearsal import undone, warm_up
from raydali.measure.records import VOID_ABOVE
from raydali.training.forward_backward import Precision
from tests.support.digits import digits_data
from tests.support.ranks import LocalSession, folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
CONFIG = replace(DIGITS, epochs=4, batch_size=64, global_batch_size=64, ema_decay=0.9, name="run")
DEVICE = torch.device("cuda", 0)


def tensors_of(modules: Sequence[nn.Module], optimizer: Optimizer) -> list[torch.Tensor]:
    """Copies of all that a step changes."""
    found = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    found += [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    return [tensor.detach().clone() for tensor in found]


def losses(path: Path, monkeypatch: pytest.MonkeyPatch, *, measures: bool, compiled: bool) -> list[dict[str, Any]]:
    """The epochs of a run whose first ceiling is a tiny part of the true one."""
    rates: list[float] = []
    restored: list[bool] = []

    @contextmanager
    def watched(modules: Sequence[nn.Module], optimizer: Optimizer, precision: Precision) -> Iterator[None]:
        before = tensors_of(modules, optimizer)
        with undone(modules, optimizer, precision):
            yield
        after = tensors_of(modules, optimizer)
        restored.append(len(before) == len(after) and all(map(torch.equal, before, after)))

    def slow(*args: Any, **settings: Any) -> Generator[Any, None, Ceiling]:
        found = yield from warm_up(*args, **settings)
        if found.images_per_second is None:
            return found
        rates.append(found.images_per_second / (1 if rates else 10_000))
        return replace(found, images_per_second=rates[-1])

    with monkeypatch.context() as patched:
        patched.setattr(rehearsal, "undone", watched)
        patched.setattr(rehearsal, "warm_up", slow)
        session = LocalSession(folder_of(path, f"{measures}"), device=DEVICE)
        train(replace(CONFIG, ceiling=measures, compile=compiled), digits_data(), session)
    session.checkpoints.finish()
    assert restored == [True] * (1 + measures)  # bit for bit, before the first step and behind an epoch
    assert len([row for row in session.rows if row["event"] == "ceiling"]) == measures
    return session.folder.rows("epochs.jsonl")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_void_ceiling_is_remeasured_with_the_captured_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    measured = losses(tmp_path, monkeypatch, measures=True, compiled=compiled)
    plain = losses(tmp_path, monkeypatch, measures=False, compiled=compiled)
    assert measured[0]["of_ceiling"] is None and 0 < measured[-1]["of_ceiling"] <= VOID_ABOVE
    assert [row["loss"] for row in measured] == pytest.approx([row["loss"] for row in plain], rel=0.05)
    assert measured[-1]["validation"]["loss"] == pytest.approx(plain[-1]["validation"]["loss"], rel=0.1)
