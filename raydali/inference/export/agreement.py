"""Agreement of an exported model with `raydali evaluate`, whose pixels come from the run's own loader, such as DALI."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raydali.inference.kinds.classification import Classification
from raydali.inference.kinds.multi_label import THRESHOLD, MultiLabel
from raydali.inference.session import Session, joined
from raydali.launch.options import LaunchOptions

LEAST = 0.995
"""The share of answers that must be the same; one answer may always differ."""


@dataclass(frozen=True)
class Agreement:
    """How many answers are the same.

    Attributes:
        same: number of answers that are the same.
        answers: number of all that were compared.
    """

    same: int
    answers: int

    @property
    def share(self) -> float:
        """The share of answers that are the same."""
        return self.same / self.answers

    @property
    def suffices(self) -> bool:
        """True if so many answers are the same that only rounding of pixels can be the cause."""
        return self.answers - self.same <= max(1, (1 - LEAST) * self.answers)


def agreement(used: Session, options: LaunchOptions, answers: Mapping[int, Any]) -> Agreement | None:
    """Evaluate the same images as `raydali evaluate` does, in 32-bit floats.

    Args:
        used: the trained model with the images.
        options: where it runs.
        answers: of the exported model, by id: a class, or (C,) whether the image has each label.

    Returns:
        The agreement over images that both could read; None if there are none, or the model has no classes.

    Raises:
        UsageError, CommandError, DataError, StorageAway: see `Session.results`.
    """
    if not isinstance(used.kind, Classification):
        return None
    exact = replace(used, inference=replace(used.inference, precision="fp32"))
    arrays = joined(exact.inference, exact.results(options)).arrays
    several = isinstance(used.kind, MultiLabel)
    evaluated = arrays["probabilities"] > THRESHOLD if several else arrays["best"][:, 0]
    pairs = [(answers[id], said) for id, said in zip(arrays["ids"].tolist(), evaluated, strict=True) if id in answers]
    same = np.array([mine == said for mine, said in pairs])
    return Agreement(int(same.sum()), same.size) if same.size else None
