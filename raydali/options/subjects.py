"""This file has the options that some jobs share, by subject: a job's Config takes them in as base classes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from raydali.data.augment.augmentation import Augmentation, WarpFilter
from raydali.data.index.labeled import LabeledFiles, LabeledSource
from raydali.data.tasks.classification import ImageSizes
from raydali.data.tasks.pipeline import Interpolation
from raydali.data.tasks.settings import IMAGENET_MEAN
from raydali.errors import UsageError
from raydali.options.every_job import ImageOptions, TrainingOptions
from raydali.options.placement import AT_LEAST_0, AT_LEAST_1, Bounds, require
from raydali.options.splitting import SplitOptions, require_data
from raydali.text import plural, summarize
from raydali.training.learning_rates import PEAKS, OptimizerName, parse_schedule
from raydali.training.recipe import find_recipe

if TYPE_CHECKING:
    from torch import nn

SHARE = Bounds(least=0, below=1)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(TrainingOptions):
    """The course of the learning rate, and the clipping of gradients."""

    schedule: str = "cosine"
    """Decay of the learning rate after the warm-up: cosine; step:EPOCHS,FACTOR, which multiplies it by FACTOR each
    EPOCHS epochs of the run; poly:POWER, where poly:1 is linear; or wsd:SHARE, which keeps the peak and then falls
    linearly in this last share of the run (wsd alone: 0.2)."""
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
    momentum: Annotated[float, SHARE] = 0.9
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


@dataclass(frozen=True, kw_only=True)
class StartingWeightsOptions(TrainingOptions):
    """Trained weights to start from, and which of them stay as they are."""

    weights: str | None = None
    """Trained weights to start from: `default`, those that are published with the model; a file (.pt, .pth,
    .safetensors); or the folder of a run. Default: random weights."""
    freeze: str | None = None
    """Regular expression: parameters whose names it matches from their beginning are not trained. `(?!fc)` matches all
    but the parameters of a layer fc."""
    new_layers: str | None = None
    """Regular expression: layers whose names it matches from their beginning need not be in --weights, and begin at
    random. Default: weights that lack a layer besides the head are refused."""


@dataclass(frozen=True, kw_only=True)
class FineTuningOptions(StartingWeightsOptions, OptimizerOptions):
    """Trained weights to start from, and how fast each layer changes."""

    layer_decay: Annotated[float, Bounds(above=0, most=1)] = 1.0
    """Factor of the learning rate from each layer to the one before it; 1: all layers have the same rate."""
    head_lr_scale: Annotated[float, Bounds(above=0)] = 1.0
    """Factor of the learning rate of the head, the layers whose size depends on the number of classes."""

    changes_groups = (*OptimizerOptions.changes_groups, "freeze", "layer_decay", "head_lr_scale")

    def optimizer_settings(self, build: "Callable[[int], nn.Module]", classes: int) -> dict[str, Any]:
        """Return the arguments of `build_optimizer` besides the model and the learning rate; see OptimizerOptions."""
        settings = super().optimizer_settings(build, classes)
        if self.layer_decay == self.head_lr_scale == 1:
            return settings
        from raydali.training.finetuning import learning_rate_scales
        from raydali.training.models.classification import head_names, on_meta

        model, head = on_meta(partial(build, classes)), head_names(build, classes)
        scales = learning_rate_scales(model, head, layer_decay=self.layer_decay, head_lr_scale=self.head_lr_scale)
        return settings | {"scales": scales}


@dataclass(frozen=True, kw_only=True)
class WeightsOptions(FineTuningOptions):
    """Fine-tuning, and the normalisation of the model's images."""

    model: str
    mean: tuple[float, float, float] | None = None
    """Mean of each channel that normalises images, in 0..1. Default: from --weights, or ImageNet's (of videos:
    Kinetics')."""
    std: tuple[float, float, float] | None = None
    """Standard deviation of each channel that normalises images. Default: from --weights, or ImageNet's (of videos:
    Kinetics')."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std is not None and min(self.std) <= 0:
            raise UsageError(f"--std must be above 0 for each channel, not {self.std}")
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and max(values) > 1:
                of_one = " ".join(f"{value / 255:.3f}" for value in values)
                raise UsageError(f"--{name} is at most 1, the full range, not {max(values):g}: give --{name} {of_one}")


@dataclass(frozen=True, kw_only=True)
class AugmentationOptions(WeightsOptions, ImageOptions):
    """The images that a model takes, and the augmentation of training images after their random crop and flip."""

    image_size: int | str | None = None
    """Height and width of the model's images, in pixels. Or FIRST:LAST@EPOCH-EPOCH: 160:192@65-76 trains on 160 pixels
    until epoch 65, and then on larger images up to 192 from epoch 76 on. Default: from --weights, or 224."""
    val_image_size: Annotated[int | None, AT_LEAST_1] = None
    """Height and width of validation images, in pixels. Default: the last --image-size."""
    resize_size: int | None = None
    """Validation: length of the shorter side before the centre crop, in pixels. Default: from --weights, or 8/7 of
    the size of validation images."""
    tta: Literal["none", "flip"] = "none"
    """flip: validate by the mean output of each image and its mirror image."""
    interpolation: Interpolation | None = None
    """Filter that resizes images: bilinear or bicubic. Default: from --weights, or bilinear."""
    augment: str = "none"
    """Policy: none, trivial, rand:MAGNITUDE,OPERATIONS, auto, three, augmix, jitter:STRENGTH[,HUE], grey:P, blur:P,
    shift:PIXELS, or timm's such as rand-m7-mstd0.5-inc1; several are joined by +."""
    erase: float = 0.0
    """Probability that a rectangle of 2 to 33 % of the image is replaced by the mean colour (random erasing)."""
    augment_interpolation: WarpFilter = "bilinear"
    """Filter of the policy's rotations, shears and translations: bilinear or nearest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.image_sizes, self.augmentation

    @property
    def image_sizes(self) -> ImageSizes:
        """The size of training images in each epoch."""
        return ImageSizes.parse(224 if self.image_size is None else self.image_size)

    @property
    def validation_size(self) -> int:
        """The size of validation images."""
        return self.val_image_size or self.image_sizes.last

    @property
    def inputs(self) -> dict[str, Any]:
        """The settings that pipelines of training and of validation images share."""
        return {"interpolation": self.interpolation or "bilinear", **self.decoding}

    @property
    def augmentation(self) -> Augmentation:
        """The augmentation that the options ask for; it is false if they ask for none."""
        red, green, blue = (round(255 * value) for value in self.mean or IMAGENET_MEAN)
        return Augmentation(self.augment, self.erase, (red, green, blue), self.augment_interpolation)


@dataclass(frozen=True, kw_only=True)
class ClassifierOptions(TrainingOptions):
    """The loss of a classifier."""

    loss: Literal["ce", "bce", "focal", "asymmetric"] = "ce"
    """Training loss: ce, cross-entropy; bce, a binary cross-entropy for each class, which --multi-label has with ce,
    too; focal, which counts what is already right less; or asymmetric, which counts negatives of --multi-label less."""
    bce_threshold: Annotated[float | None, SHARE] = None
    """With --loss bce, share of a class in a mixed and smoothed target above which the target is 1, and else 0.
    Default: targets stay shares."""
    label_smoothing: Annotated[float, SHARE] = 0.1
    """Label smoothing: share of the target that is spread over all classes."""
    class_weights: Literal["balanced"] | None = None
    """balanced: rare classes weigh as much in the loss as frequent ones. Default: all samples have the same weight."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bce_threshold is not None and self.loss != "bce":
            raise UsageError(f"--bce-threshold {self.bce_threshold:g} is for another loss: also give --loss bce")
        if self.class_weights is not None and self.loss != "ce":
            raise UsageError(
                f"--class-weights {self.class_weights} and --loss {self.loss} exclude each other: give one"
            )
        if self.loss == "asymmetric" and not (isinstance(self, MultiLabelOptions) and self.multi_label):
            raise UsageError("--loss asymmetric is for several labels, see --multi-label: give --loss focal for one")
        if self.loss in ("focal", "asymmetric") and self.label_smoothing:
            raise UsageError(
                f"--loss {self.loss} and --label-smoothing {self.label_smoothing:g} work against each other: "
                "also give --label-smoothing 0"
            )

    @property
    def weighting(self) -> dict[str, Any]:
        """The options that `classification_loss` takes."""
        names = "loss", "bce_threshold", "label_smoothing", "class_weights"
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, kw_only=True)
class RegularizationOptions(TrainingOptions):
    """Mixed images, stochastic depth and averaged weights."""

    mixup: Annotated[float, AT_LEAST_0] = 0.0
    """Alpha of mixup; 0: no mixup."""
    cutmix: Annotated[float, AT_LEAST_0] = 0.0
    """Alpha of CutMix; 0: no CutMix. With --mixup, each micro-batch gets one of the two."""
    drop_path: Annotated[float | None, SHARE] = None
    """Stochastic depth: probability that a sample skips the last residual block; it is lower in earlier ones. Default:
    the model's own."""
    ema_decay: Annotated[float, SHARE] = 0.0
    """Decay per step of a moving average of the weights, which is validated in their place; 0: no average."""
    ema_warmup: bool = False
    """Limit the decay to (1 + t) / (10 + t) in step t, so that the average soon forgets the first weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ema_warmup and not self.ema_decay:
            raise UsageError("--ema-warmup is for a moving average: also give --ema-decay, such as --ema-decay 0.9999")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(TrainingOptions):
    """The settings of a published training."""

    recipe: str | None = None
    """Published training whose settings are the defaults: torchvision-v2, a1, a2, a3, ffcv-16, ffcv-88, deit3-s or
    fashion. Options that are given win, and are listed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe is not None:
            find_recipe(self.recipe)


@dataclass(frozen=True, kw_only=True)
class LabeledDataOptions(SplitOptions):
    """Samples with labels: class folders, lists or shards."""

    data: str | None = None
    """Folder or URI (s3://, gs://) of class folders, or with train/ and val/, each with class folders or tar shards; or
    a list, shards, or Parquet files. Default: built-in samples."""
    val_data: str | None = None
    """Validation samples; --data then has the training samples only. Each is a folder, a list with lines path,label, or
    a pattern such as `shard-{000..146}.tar` or `validation-*.parquet`."""
    root: str | None = None
    """Folder or URI that relative paths in a list start from. Default: the list's folder."""
    label_column: str | None = None
    """Column of a list with the labels, by its name in the header, or by its number from 1 after the path; needed if a
    line has more fields than path,label. Or of Parquet files; there, the default is label."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_data(self, self.data, "val_data", "root", "label_column")

    @property
    def reading(self) -> dict[str, Any]:
        """The options that `train_and_val` takes besides the data; none of them is for built-in samples."""
        names = "val_data", "root", "label_column"
        return {name: getattr(self, name) for name in names} | self.splitting if self.data is not None else {}

    def describe(self, train: LabeledSource, val: LabeledSource, noun: str = "image") -> str:
        """The sizes of both sets, and the classes in their order, for the console."""
        may_be_split = any(self.splitting.values()) or isinstance(train, LabeledFiles)
        was_split = may_be_split and self.val_data is None and train.root == val.root
        note = f" ({100 * len(val) / (len(train) + len(val)):.3g} % split off)" if was_split else ""
        sets = f"{plural(len(train), f'training {noun}')}, {plural(len(val), f'validation {noun}')}{note}"
        names = plural(len(train.classes), "label" if train.one_each is None else "class")
        return f"{sets}, {names}: {summarize(train.classes, 5, show=repr)}"


@dataclass(frozen=True, kw_only=True)
class MultiLabelOptions(LabeledDataOptions):
    """Labelled images, which may have several labels each, and be in Parquet files."""

    multi_label: bool = False
    """Train on lists with a column for each label, 0 or 1 in each line, and a header: a sigmoid for each. Default: one
    class per sample."""
    image_column: str | None = None
    """Column of Parquet files with the images. Default: image."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_data(self, self.data, "image_column", "multi_label")

    @property
    def reading(self) -> dict[str, Any]:
        """The options that `train_and_val` takes besides the data."""
        return super().reading | {"multi_label": self.multi_label, "image_column": self.image_column}
