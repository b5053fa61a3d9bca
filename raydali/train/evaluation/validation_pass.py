"""One pass over validation samples, as an evaluation takes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raydali.data.loading.loader import Batch
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
