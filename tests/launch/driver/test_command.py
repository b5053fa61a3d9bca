"""The command line of a job: which defaults apply, and that options win over them."""

from pathlib import Path

import pytest

from jobs.imagenet import DIGITS, FINE_TUNING, Config
from raydali.errors import UsageError
from raydali.launch.driver.command import parse
from raydali.training.recipe import find_recipe
from tests.support.messages import mentioning


def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str) -> Config:
    monkeypatch.setattr("sys.argv", ["imagenet.py", "--storage", str(tmp_path), *options.split()])
    return parse(Config, demo=DIGITS, fine_tuning=FINE_TUNING)


@pytest.mark.parametrize("options", ["", "--data x", "--data x --weights default"])
@pytest.mark.parametrize("recipe", ["--recipe fashion", "--recipe=fashion"])
def test_options_win_over_a_recipe_which_wins_over_other_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str, recipe: str
) -> None:
    config = parsed(monkeypatch, tmp_path, f"{options} --epochs 7 {recipe} --no-nesterov")
    expected = find_recipe("fashion").options() | {"recipe": "fashion", "epochs": 7, "nesterov": False}
    expected["weights"] = "default" if "weights" in options else None
    assert {name: getattr(config, name) for name in expected} == expected


def test_without_a_recipe_the_data_decide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert parsed(monkeypatch, tmp_path, "").epochs == DIGITS.epochs
    assert parsed(monkeypatch, tmp_path, "--data x").epochs == Config.epochs
    assert parsed(monkeypatch, tmp_path, "--data x --weights default").epochs == FINE_TUNING.epochs


def test_what_contradicts_a_recipe_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=mentioning("--ema-warmup --recipe fashion sets not given")):
        parsed(monkeypatch, tmp_path, "--recipe fashion --ema-decay 0")
    with pytest.raises(UsageError, match=mentioning("--recipe fashon fashion")):
        parsed(monkeypatch, tmp_path, "--recipe fashon --epochs 3")


@pytest.mark.parametrize(
    ("options", "shard"),
    [("", None), ("--shard", "all"), ("--shard --epochs 3", "all"), ("--shard 4 --epochs 3", 4), ("--shard=2", 2)],
)
def test_shards_are_over_all_workers_without_a_number(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: str, shard: object
) -> None:
    assert parsed(monkeypatch, tmp_path, options).shard == shard
