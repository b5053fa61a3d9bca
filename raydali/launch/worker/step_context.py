"""All steps of a run share these parts on a rank: TrainingRun makes them, and Step uses them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from raydali.launch.worker.recovery import Recovery
from raydali.measure.allreduce_wait import AllReduceTimer
from raydali.train.batchnorm import RunningStatistics
from raydali.train.precision import Precision
from raydali.train.step import ForwardBackward
from raydali.train.update_backup import UpdateBackup
from raydali.train.worker import Worker


@dataclass
class StepContext:
    """The parts that all steps of a run on this rank share.

    Attributes:
        worker: this rank.
        micro_batches: number of micro-batches of a global batch that this rank trains on.
        before_update: called before each update; a checkpoint may still copy the weights.
        recovery: how the rank goes on after a change of ranks; None if it does not.
        differentiated: what a rank without micro-batches all-reduces; set with `recovery`.
        apart: whether an all-reduce follows the backward pass, see ForwardBackward.
        backup: of what an update changes; None if ranks cannot be lost.
        allreduce: the timer of an all-reduce within the backward pass; None if there is none.
        learning_rate: the learning rate of the newest step.
        counted_flops: called with the floating-point operations of an image if those of the next micro-batch are to be
            counted, see `measure.flops`.
        has_updated: whether all kernels of an update are loaded. To load one waits for the GPU, where a sum waits for
            lost ranks: before, the host must wait for the sum, since only there it hears of a loss.
    """

    worker: Worker
    micro_batches: int
    seed: int
    model: nn.Module
    statistics: RunningStatistics
    precision: Precision
    before_update: Callable[[], None]
    recovery: Recovery | None = None
    differentiated: ForwardBackward | None = None
    apart: bool = False
    backup: UpdateBackup | None = None
    allreduce: AllReduceTimer | None = None
    learning_rate: float = 0.0
    counted_flops: Callable[[float | None], None] | None = None
    has_updated: bool = False
