"""A soak: what counts as growth, and a short soak of a real run."""

import json
from pathlib import Path

import pytest

from raydali.errors import CommandError
from tests.support import soak
from tests.support.messages import mentioning, mentions
from tests.support.soak import LIMITS, Soak, judged, series

EPOCHS = range(1, 201)


def test_what_fills_at_first_and_then_stays_is_no_growth() -> None:
    row = judged("rank 0", "memory", EPOCHS, [min(500 + 20 * epoch, 900) + epoch % 3 for epoch in EPOCHS])
    assert abs(row["growth"]) <= 1 and row["growth"] <= row["allowed"]


def test_a_leak_is_growth() -> None:
    row = judged("rank 0", "memory", EPOCHS, [500 + 0.5 * epoch for epoch in EPOCHS])
    assert row["growth_an_epoch"] == pytest.approx(0.5) and row["growth"] > row["allowed"]
    row = judged("driver", "files", EPOCHS, [40 + epoch // 20 for epoch in EPOCHS])
    assert row["growth"] > row["allowed"] == LIMITS["files"].always


@pytest.mark.parametrize("at", [60, 100, 140, 180])
def test_a_single_step_is_no_growth(at: int) -> None:
    row = judged("rank 0", "memory", EPOCHS, [650 + 12.0 * (epoch >= at) + epoch % 2 for epoch in EPOCHS])
    assert row["growth"] <= row["allowed"]


def test_a_leak_of_a_very_long_run_is_growth() -> None:
    epochs = range(1, 5001)
    row = judged("rank 0", "memory", epochs, [500 + 0.2 * epoch for epoch in epochs])
    assert row["growth_an_epoch"] == pytest.approx(0.2) and row["growth"] > row["allowed"]


def test_growth_within_the_noise_of_few_epochs_is_tolerated() -> None:
    row = judged("rank 0", "memory", range(1, 9), [500, 505, 506, 507, 508, 509, 510, 511])
    assert 0 < row["growth"] <= row["allowed"] == LIMITS["memory"].always


def test_processes_that_come_and_go_are_left_out() -> None:
    here, away = {("driver", "files"): 3.0}, {("driver", "files"): 3.0, ("rank 0", "files"): 4.0}
    assert series([(1, here), *((epoch, away) for epoch in range(2, 10))]) == {
        ("driver", "files"): ([*range(1, 10)], [3.0] * 9)
    }
    with pytest.raises(CommandError, match=mentioning("2 8 --epochs --batch")):
        series([(1, here), (2, away)])


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = soak.main(Soak(epochs=16, json=str(tmp_path / "soak.json")))
    rows = {(row["process"], row["figure"]): row for row in result["rows"]}
    assert {process for process, _ in rows} >= {"driver", "controller", "rank 0", "rank 1"}
    for process in ("driver", "rank 0", "rank 1"):
        assert min(rows[process, "memory"]["values"]) > 50
        assert min(rows[process, "files"]["values"]) > 5 and min(rows[process, "threads"]["values"]) > 2
    assert json.loads((tmp_path / "soak.json").read_text())["rows"] == result["rows"]
    assert mentions(capsys.readouterr().out, "16 epochs 2 workers")
