"""A void ceiling is measured again behind an epoch, with the captured step, and the run knows nothing of it."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.imagenet import DIGITS, train
from raydali.measure import ceiling
from raydali.train import warmup
from tests.support.digits import digits_data
from tests.support.ranks import LocalSession, folder_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
CONFIG = replace(DIGITS, epochs=4, batch_size=64, global_batch_size=64, ema_decay=0.9, name="run")


def losses(path: Path, monkeypatch: pytest.MonkeyPatch, *, measures: bool, compiled: bool) -> list[dict[str, Any]]:
    """The epochs of a run whose first ceiling is a tiny part of the true one."""
    measured: list[float] = []

    def slow(*args: Any) -> Generator[Any, None, float]:
        measured.append((yield from ceiling.ceiling_images_per_second(*args)) / (1 if measured else 10_000))
        return measured[-1]

    monkeypatch.setattr(warmup, "ceiling_images_per_second", slow)
    session = LocalSession(folder_of(path, f"{measures}"), device=torch.device("cuda", 0))
    train(replace(CONFIG, ceiling=measures, compile=compiled), digits_data(), session)
    session.checkpoints.finish()
    assert len([row for row in session.rows if row["event"] == "ceiling"]) == measures
    return session.folder.rows("epochs.jsonl")


@pytest.mark.parametrize("compiled", [False, True])
def test_a_void_ceiling_is_remeasured_with_the_captured_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    measured = losses(tmp_path, monkeypatch, measures=True, compiled=compiled)
    plain = losses(tmp_path, monkeypatch, measures=False, compiled=compiled)
    assert measured[0]["of_ceiling"] is None and 0 < measured[-1]["of_ceiling"] <= ceiling.VOID_ABOVE
    assert [row["loss"] for row in measured] == pytest.approx([row["loss"] for row in plain], rel=0.05)
    assert measured[-1]["validation"]["loss"] == pytest.approx(plain[-1]["validation"]["loss"], rel=0.1)
