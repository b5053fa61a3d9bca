"""When a run ends before its last epoch, by its rows alone."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydali.run.early_end import early_end
from tests.support.messages import mentions


def rows(scores: Sequence[float | str | None]) -> list[dict[str, Any]]:
    """Epochs with these scores; "-" stands for one without validation, and None for NaN."""
    return [
        {"epoch": epoch, "validation": None if score == "-" else {"top1": score, "loss": -epoch}}
        for epoch, score in enumerate(scores)
    ]


@given(st.lists(st.sampled_from(["-", None, 0.1, 0.2, 0.3])), st.integers(1, 6))
def test_patience_ends_a_run_in_the_epoch_of_the_nth_validation_without_a_better_score(
    scores: list[float | str | None], patience: int
) -> None:
    validated = [-1.0 if score is None else float(score) for score in scores if score != "-"]
    newest, before = validated[-patience:], [0.0, *validated[:-patience]]
    expected = len(validated) >= patience and max(newest) <= max(before)
    why = early_end(rows(scores), "top1", patience=patience, stop_after=None)
    assert (why is not None) == expected
    if why is not None and max(validated) > 0:
        assert mentions(why, f"best in epoch {scores.index(max(validated))}")


@pytest.mark.parametrize(
    ("scores", "patience", "words"),
    [
        ([0.1, 0.3, 0.3, 0.2], 2, "2 validations epoch 1"),
        ([0.1, 0.3, "-", 0.3, "-"], 1, "1 validation epoch 1"),
        ([0.1, 0.3, 0.3, 0.2], 3, None),
        ([None, None], 2, "2 validations"),
        ([0.1, None, 0.2], 1, None),
        ([], 1, None),
        (["-", "-"], 1, None),
    ],
)
def test_patience_counts_validations_that_follow_the_best_one(
    scores: list[float | str | None], patience: int, words: str | None
) -> None:
    why = early_end(rows(scores), "top1", patience=patience, stop_after=None)
    assert why is None if words is None else why is not None and mentions(why, words)


def test_without_a_best_epoch_no_score_is_better() -> None:
    """After validations whose scores were all NaN, model.json names no metric."""
    why = early_end(rows([None, None]), None, patience=2, stop_after=None)
    assert why is not None and "epoch" not in why


def test_a_number_of_epochs_ends_a_run_whether_they_were_validated_or_not() -> None:
    ends = [early_end(rows(["-"] * epochs), None, patience=None, stop_after=3) is not None for epochs in range(5)]
    assert ends == [False, False, False, True, True]
    assert early_end(rows([0.3, 0.2]), "top1", patience=None, stop_after=None) is None
