"""What evaluations of all tasks share: a pass over validation samples, and the mode of the model meanwhile."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from raydali.data.loading.loader import Batch, Loader
from raydali.data.loading.quarantine import none_read
from raydali.train.step import Precision
from raydali.train.worker import Worker


@dataclass(frozen=True)
class ValidationPass:
    """A pass of one rank over its share of the validation samples, each of which comes once, on one rank.

    Attributes:
        batches: those of this rank. Ranks may have different numbers of them, or none, so that an evaluation
            communicates only after the last one, by `worker`.
        source: all validation samples, which the ids of a batch refer to.
        worker: this rank.
        precision: of the forward pass; `precision.autocast()` applies it.
    """

    batches: Iterable[Batch]
    source: Any
    worker: Worker
    precision: Precision


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode inside this context, and restore the mode of each module afterwards.

    A frozen BatchNorm was in evaluation mode before, and remains in it.
    """
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(before[0][1])
        for module, training in before:
            module.training = training


def require_read(samples: float, batches: Iterable[Batch]) -> None:
    """Check that some rank could read samples of these batches.

    Raises:
        DataError: none could; the message names one that this rank found to be broken.
    """
    if not samples:
        raise none_read(batches.quarantine.known.values() if isinstance(batches, Loader) else ())
