"""What a recipe is: the settings that decide what a run learns, and the figure that was published for them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from raydali.train.learning_rates import OptimizerName


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Values of options of jobs/imagenet.py by their names; the job's help says what they mean.

    Sizes are in pixels, and `batch_size` is the published one for a GPU: the most that a micro-batch gets.
    """

    epochs: int
    global_batch_size: int
    batch_size: int
    repeats: int = 1

    model: str
    weights: str | None = None
    freeze: str | None = None
    drop_path: float | None = None
    sync_bn: bool = False

    image_size: int | str
    val_image_size: int
    resize_size: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    tta: Literal["none", "flip"] = "none"

    random_area: tuple[float, float] = (0.08, 1.0)
    flip_probability: float = 0.5
    augment: str = "none"
    erase: float = 0.0
    augment_interpolation: Literal["bilinear", "nearest"] = "bilinear"
    mixup: float = 0.0
    cutmix: float = 0.0

    loss: Literal["ce", "bce"] = "ce"
    bce_threshold: float | None = None
    label_smoothing: float = 0.1
    class_weights: Literal["balanced"] | None = None

    optimizer: OptimizerName = "sgd"
    learning_rate: float
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float
    no_decay: Literal["norms", "norms-and-biases", "none"] = "norms-and-biases"
    layer_decay: float = 1.0
    head_lr_scale: float = 1.0
    clip_grad: float | None = None
    schedule: str = "cosine"
    warmup_epochs: float
    warmup_start: float = 0.0
    min_learning_rate: float = 0.0
    ema_decay: float = 0.0
    ema_warmup: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A published training.

    Attributes:
        top1: the published accuracy, 0..1.
        measured_on: the data and the images that it was measured on.
        source: URL.
        settings: the options.
    """

    top1: float
    measured_on: str
    source: str
    settings: Settings

    def options(self) -> dict[str, Any]:
        """Return the values of the options by name."""
        return {each.name: getattr(self.settings, each.name) for each in fields(self.settings)}

    def differences(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield a phrase for each setting of a run, as `config.json` has them, that is not the recipe's."""
        for name, value in self.options().items():
            given = settings.get(name, value)
            given = tuple(given) if isinstance(given, list) else given
            if given != value:
                yield f"{_flag(name, given)} instead of {_value(name, value)}"


def _flag(name: str, value: object) -> str:
    return _value(name, value) if isinstance(value, bool) else f"--{name.replace('_', '-')} {_value(name, value)}"


def _value(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name.replace('_', '-')}"
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def micro_batch(global_batch_size: int, most: int, workers: int) -> int:
    """Return the largest divisor of a global batch that is at most `most`, and of which each worker gets at least one.

    With more workers than samples it is 1, which the stream refuses.
    """
    most = max(1, min(most, global_batch_size // workers))
    return next(size for size in range(most, 0, -1) if global_batch_size % size == 0)
