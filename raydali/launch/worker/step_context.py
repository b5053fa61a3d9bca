"""All steps of a run share these parts on a rank: TrainingRun makes them, and Step uses them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from raydali.measure.allreduce_wait import AllReduceTimer
from raydali.train.batchnorm import RunningStatistics
from raydali.train.precision import Precision
from raydali.train.worker import Worker


@dataclass
class StepContext:
    """The parts that all steps of a run on this rank share.

    Attributes:
        worker: this rank.
        micro_batches: number of micro-batches of a global batch that this rank trains on.
        before_update: called before each update; a checkpoint may still copy the weights.
        allreduce: the timer of the all-reduce; None for one rank.
        learning_rate: the learning rate of the newest step.
        counted_flops: called with the floating-point operations of an image if those of the next micro-batch are to be
            counted, see `measure.flops`.
    """

    worker: Worker
    micro_batches: int
    seed: int
    model: nn.Module
    statistics: RunningStatistics
    precision: Precision
    before_update: Callable[[], None]
    allreduce: AllReduceTimer | None = None
    learning_rate: float = 0.0
    counted_flops: Callable[[float | None], None] | None = None
