"""Muon as one CUDA graph on a GPU: its updates against torch's own, and its time against theirs."""

import statistics
from collections.abc import Callable

import pytest
import torch

from raydali.training import optim
from raydali.training.models.classification import build_model
from raydali.training.worker import Worker
from tests.support.torch_muon import ComparedMuon

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


def compared(name: str, *, keeps_gradients: bool = True) -> ComparedMuon:
    Worker.join(GPU, cpus=1, node="")  # on a stream that can be captured
    torch.manual_seed(0)
    model = build_model(name, 10).to(GPU).to(memory_format=torch.channels_last)
    return ComparedMuon(model, keeps_gradients=keeps_gradients)


def is_captured(both: ComparedMuon) -> bool:
    assert isinstance(both.optimizer, optim.MuonWithAdamW)
    return both.optimizer._directions._graph is not None


@pytest.mark.parametrize("name", ["resnet9", "resnet50", "vit_b_32"])
def test_captured_updates_are_torchs(name: str) -> None:
    both = compared(name)
    for step in range(20):
        both.step(0.01 / (step + 1), seed=step)
        assert is_captured(both) is (step > 0)
        if step == 10:
            both.reload()
    both.check()


def test_other_gradients_are_captured_anew() -> None:
    both = compared("resnet9")
    for step in range(9):
        if step in (3, 6):
            both.drop_gradients()
        both.step(0.01, seed=step)
        assert is_captured(both) is (step not in (0, 3, 6))
    both.check()


def test_without_lasting_gradients_nothing_is_captured() -> None:
    both = compared("resnet9", keeps_gradients=False)
    for step in range(4):
        both.step(0.01, seed=step)
        assert not is_captured(both)
    both.check()


@pytest.mark.parametrize("name", ["resnet9", "resnet50", "wrn40_4"])
def test_captured_updates_are_faster(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, default = {}, optim.BRANCHES
    for branches in (1, 2, 4, 8):
        monkeypatch.setattr(optim, "BRANCHES", branches)
        both = compared(name)
        for _ in range(3):
            both.step(0.0)
        taken[f"{branches} branches"] = milliseconds(both.optimizer.step)
    taken["torch's Muon"] = milliseconds(both.torchs.step)
    with capsys.disabled():
        print(f"\n{name}, ms per update:", ", ".join(f"{how} {ms:.2f}" for how, ms in taken.items()))
    assert taken[f"{default} branches"] < taken["torch's Muon"]


def milliseconds(update: Callable[[], object], times: int = 20) -> float:
    """The median of several updates, each from the host's first launch to the end of the device's work."""
    taken: list[float] = []
    for _ in range(times):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        update()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end))
    return statistics.median(taken)
