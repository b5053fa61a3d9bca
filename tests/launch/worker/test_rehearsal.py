"""A rank that joins others expects the size of their images; a kept ceiling belongs to the code that it is of."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from raydali.launch.worker.rehearsal import Rehearsal
from raydali.launch.worker.run_ceiling import code_of
from tests.support.digits import SHORT
from tests.support.ranks import LocalSession, folder_of

SIZES = 32, 32, 64, 64
"""The images of each epoch have this size, in pixels."""
STREAM = replace(SHORT, epochs=len(SIZES)).stream(1437)


@pytest.mark.parametrize(("epoch", "is_another"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_rank_that_joins_others_expects_the_size_of_their_epoch(tmp_path: Path, epoch: int, is_another: bool) -> None:
    """It has no checkpoint, and rehearses the size of epoch 0 last."""
    forgotten: list[bool] = []
    graph: Any = SimpleNamespace(expect_other_shapes=lambda: forgotten.append(True), warm_up_steps=3, loss=print)
    loader: Any = SimpleNamespace(order=STREAM, pipeline=SimpleNamespace(in_epoch=SIZES.__getitem__))
    context: Any = SimpleNamespace(model=nn.Identity())
    nothing: Any = None
    session = LocalSession(folder_of(tmp_path))
    rehearsal = Rehearsal(
        session, SHORT, nothing, loader, loader, context, nothing, {}, [graph], lambda: None, captures=True
    )
    step = next(step for step in range(STREAM.steps) if STREAM.epoch_of(step) == epoch)
    rehearsal.join_at(step)
    assert forgotten == [True] * is_another
    rehearsal.join_at(step)
    assert forgotten == [True] * is_another


def imported(file: Path, code: str) -> ModuleType:
    file.write_text(code)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_other_code_of_a_loss_or_a_model_is_another_one(tmp_path: Path) -> None:
    model = "from torch import nn\nclass Net(nn.Module):\n    def forward(self, x):\n        return x * 2\n"
    loss = "def loss(x):\n    return x.mean()\n"
    of_loss, of_model = imported(tmp_path / "the_loss.py", loss).loss, imported(tmp_path / "the_model.py", model).Net()
    before = code_of(of_model, [of_loss, print])
    assert code_of(of_model, [of_loss, print]) == before
    imported(tmp_path / "the_loss.py", loss.replace("mean", "sum"))
    after = code_of(of_model, [of_loss, print])
    assert after != before
    imported(tmp_path / "the_model.py", model.replace("2", "3"))
    assert code_of(of_model, [of_loss, print]) not in (before, after)
