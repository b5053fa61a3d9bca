"""Options of the optimizer and its learning rate, for jobs that take them in as base classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from raydali.errors import UsageError
from raydali.options.every_job import Bounds, TrainingOptions, require
from raydali.training.learning_rates import PEAKS, OptimizerName, parse_schedule

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(TrainingOptions):
    """The course of the learning rate, and the clipping of gradients."""

    schedule: str = "cosine"
    """Decay of the learning rate after the warm-up: cosine; step:EPOCHS,FACTOR, which multiplies it by FACTOR each
    EPOCHS epochs of the run; or poly:POWER, where poly:1 is linear."""
    warmup_start: Annotated[float, Bounds(least=0, most=1)] = 0.0
    """Learning rate at the beginning of the warm-up, as a share of the peak."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of the run; with --schedule step the lowest one."""
    clip_grad: Annotated[float | None, Bounds(above=0)] = None
    """Maximum norm of the gradients of all parameters together, to which they are clipped. Default: no clipping."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parse_schedule(self.schedule)
        require(self, "min_learning_rate", least=0, most=self.learning_rate)

    @cached_property
    def rates(self) -> Mapping[str, Any]:
        """The arguments of `learning_rate` besides the progress and the peak."""
        return {
            "warmup": self.warmup,
            "warmup_start": self.warmup_start,
            "minimum": self.min_learning_rate,
            "schedule": self.schedule,
            "epochs": self.epochs,
        }


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions(ScheduleOptions):
    """Options of the optimizer, for jobs that offer a choice."""

    optimizer: OptimizerName = "sgd"
    """Optimiser: sgd (with momentum); adamw for transformers and small data sets; lamb or lars (extra `timm`) for large
    batches; muon for the matrices of hidden layers, with adamw for the rest."""
    momentum: Annotated[float, Bounds(least=0, below=1)] = 0.9
    """Momentum of sgd, lars and muon."""
    nesterov: bool = True
    """Nesterov's momentum; sgd and muon only."""
    no_decay: Literal["norms", "norms-and-biases", "none"] = "norms-and-biases"
    """Parameters without weight decay: norms (in normalisation layers), norms-and-biases (all with one
    dimension), or none."""

    changes_groups: ClassVar[tuple[str, ...]] = ("optimizer", "no_decay")
    """Options that a resume must repeat, since the state of the optimizer depends on them."""
    usual_peaks: ClassVar[Mapping[OptimizerName, float]] = PEAKS
    """Default of `learning_rate` for each optimizer, per 256 samples of the global batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_batch_size is not None and self.min_learning_rate > (peak := self.peak(self.global_batch_size)):
            raise UsageError(f"--min-learning-rate must be at most the peak, {peak:g}, not {self.min_learning_rate:g}")

    def peak(self, global_batch_size: int) -> float:
        """Return the peak learning rate for this number of samples a step."""
        return self.learning_rate or self.usual_peaks[self.optimizer] * global_batch_size / 256

    def optimizer_settings(self, build: "Callable[[int], nn.Module]", classes: int) -> dict[str, Any]:
        """Return the arguments of `build_optimizer` besides the model and the learning rate.

        Args:
            build: builds the model for a number of classes, which shows what belongs to its head.
            classes: the number of classes.
        """
        settings: dict[str, Any] = {
            "name": self.optimizer,
            "weight_decay": self.weight_decay,
            "momentum": self.momentum,
            "nesterov": self.nesterov and self.momentum > 0,
            "no_decay": self.no_decay,
        }
        if self.optimizer == "muon":
            from raydali.training.models.classification import head_names

            settings["head"] = head_names(build, classes)
        return settings
