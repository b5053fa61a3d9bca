"""Recipes: the settings of published trainings, with the accuracy that was published.

Each is a function, whose docstring has the source, the accuracy and what differs from it. Tests compare the settings
with tables of the sources' own options: tests/training/recipes/.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from raydali.data.stream.stream import largest_divisor
from raydali.errors import UsageError
from raydali.training.learning_rates import OptimizerName

TV = "https://github.com/pytorch/vision/issues/3995#issuecomment-1013906621"
RSB = "https://arxiv.org/abs/2110.00476"
FFCV = "https://github.com/libffcv/ffcv-imagenet/tree/4dd291a122096a2032ec9fd19633e1b9aff3577d"
DEIT = "https://github.com/facebookresearch/deit/blob/7e160fe43f0252d17191b71cbb5826254114ea5b/README_revenge.md"
FASHION = "https://github.com/zalandoresearch/fashion-mnist#benchmark"

_TV_EMA_UPDATE = (1 - 0.99998) * 32 * 1024 / 600
"""Share of the weights in torchvision's average every 32 steps: train.py scales it by the batch and the epochs."""


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
        return dict(vars(self.settings))

    def differences(self, settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield a phrase for each setting of a run, as `config.json` has them, that is not the recipe's."""
        for name, value in self.options().items():
            of_run = settings.get(name, value)
            of_run = tuple(of_run) if isinstance(of_run, list) else of_run
            if of_run != value:
                flag = "" if isinstance(of_run, bool) else f"--{name.replace('_', '-')} "
                yield f"{flag}{_value(name, of_run)} instead of {_value(name, value)}"


def _value(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{name.replace('_', '-')}"
    return "none" if value is None else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def torchvision_v2() -> Recipe:
    """Return the recipe of torchvision's ResNet50_Weights.IMAGENET1K_V2: SGD, 600 epochs, on 8 GPUs.

    Published: top-1 80.858 % of its moving average, on ImageNet-1k, centre crops of 224 pixels out of 232.
    Source: TV, with the options of references/classification/train.py.

    What differs: the average has an update each step, of the same sum, instead of one every 32 steps, and its warm-up
    limits the decay instead of copying the weights for 5 epochs. The learning rate changes with each step, not epoch.
    """
    return Recipe(
        top1=0.80858,
        measured_on="ImageNet-1k, 224 pixels, moving average",
        source=TV,
        settings=Settings(
            model="resnet50",
            epochs=600,
            global_batch_size=1024,
            batch_size=128,
            repeats=4,
            image_size=176,
            val_image_size=224,
            resize_size=232,
            augment="trivial",
            erase=0.1,
            mixup=0.2,
            cutmix=1.0,
            learning_rate=0.5,
            nesterov=False,
            weight_decay=2e-5,
            no_decay="norms",
            warmup_epochs=5,
            warmup_start=0.01,
            ema_decay=round((1 - _TV_EMA_UPDATE) ** (1 / 32), 8),
            ema_warmup=True,
        ),
    )


def a1() -> Recipe:
    """Return procedure A1 of "ResNet strikes back" (Wightman et al., 2021): LAMB, BCE, 600 epochs, on 4 GPUs.

    Published: top-1 80.4 % on ImageNet-1k, centre crops of 224 pixels out of 235 (crop ratio 0.95), last epoch.
    Source: table 2 of RSB, whose options are timm's.

    What differs: images are resized by a bicubic filter, not by a random one; warps are bilinear. The cosine begins at
    the end of the warm-up, and the learning rate changes with each step, not epoch. See docs/recipes.md for what table
    2 does not say.
    """
    return Recipe(
        top1=0.804,
        measured_on="ImageNet-1k, 224 pixels",
        source=RSB,
        settings=Settings(
            model="timm:resnet50",
            epochs=600,
            global_batch_size=2048,
            batch_size=512,
            repeats=3,
            drop_path=0.05,
            image_size=224,
            val_image_size=224,
            resize_size=235,
            interpolation="bicubic",
            augment="rand-m7-mstd0.5-inc1",
            mixup=0.2,
            cutmix=1.0,
            loss="bce",
            bce_threshold=0.2,
            optimizer="lamb",
            learning_rate=5e-3,
            weight_decay=0.01,
            warmup_epochs=5,
            warmup_start=0.02,
            min_learning_rate=1e-6,
        ),
    )


def a2() -> Recipe:
    """Return procedure A2 of "ResNet strikes back": A1 in 300 epochs, with less mixup and without smoothing.

    Published: top-1 79.8 % on ImageNet-1k, as A1. Source and what differs: see a1.
    """
    recipe = a1()
    settings = replace(recipe.settings, epochs=300, mixup=0.1, label_smoothing=0.0, weight_decay=0.02)
    return replace(recipe, top1=0.798, settings=settings)


def a3() -> Recipe:
    """Return procedure A3 of "ResNet strikes back": A2 in 100 epochs of 160 pixels, with less regularization.

    Published: top-1 78.1 % on ImageNet-1k, at 224 pixels as A1. Source and what differs: see a1.
    """
    recipe = a2()
    settings = replace(
        recipe.settings,
        epochs=100,
        repeats=1,
        drop_path=None,
        image_size=160,
        augment="rand-m6-mstd0.5-inc1",
        learning_rate=8e-3,
        warmup_start=0.0125,
    )
    return replace(recipe, top1=0.781, settings=settings)


def ffcv_16() -> Recipe:
    """Return FFCV's ResNet-50 of 16 epochs on 8 GPUs: SGD, 160 to 192 pixels, BlurPool.

    Published: top-1 73.8 % on ImageNet-1k, at 256 pixels, mean of an image and its flip.
    Source: FFCV, rn50_configs/rn50_16_epochs.yaml with the defaults of train_imagenet.py.

    What differs: images come from the JPEGs as they are, not from copies of at most 500 pixels, and filters are
    bilinear with antialiasing instead of OpenCV's INTER_AREA. No BatchNorm decays; there, the shortcuts' do.
    """
    return Recipe(
        top1=0.738,
        measured_on="ImageNet-1k, 256 pixels, with flips",
        source=FFCV,
        settings=Settings(
            model="raydali.training.models.blur_pool:resnet50",
            epochs=16,
            global_batch_size=4096,
            batch_size=512,
            image_size="160:192@11-13",
            val_image_size=256,
            resize_size=293,
            tta="flip",
            learning_rate=1.7,
            nesterov=False,
            weight_decay=1e-4,
            no_decay="norms",
            schedule="poly:1",
            warmup_epochs=2,
            warmup_start=1e-4,
        ),
    )


def ffcv_88() -> Recipe:
    """Return FFCV's ResNet-50 of 88 epochs.

    Published: top-1 78.4 % on ImageNet-1k, as ffcv_16. Source: FFCV, rn50_configs/rn50_88_epochs.yaml.
    What differs: see ffcv_16.
    """
    recipe = ffcv_16()
    return replace(recipe, top1=0.784, settings=replace(recipe.settings, epochs=88, image_size="160:192@65-76"))


def deit3_s() -> Recipe:
    """Return ViT-S of "DeiT III: Revenge of the ViT" (Touvron et al., ECCV 2022): LAMB, BCE, 800 epochs, on 8 GPUs.

    Published: top-1 81.4 % on ImageNet-1k, centre crops of 224 pixels out of 224, last epoch.
    Source: DEIT, its command with the defaults of main.py.

    What differs: the model is timm's, whose layer scale begins with 1e-6 instead of 1e-4 and whose stochastic depth
    rises to 0.05 from block to block instead of being 0.05 in each. Class token and position embedding decay, too. No
    moving average is made: there, it is not evaluated.
    """
    return Recipe(
        top1=0.814,
        measured_on="ImageNet-1k, 224 pixels",
        source=DEIT,
        settings=Settings(
            model="timm:deit3_small_patch16_224",
            epochs=800,
            global_batch_size=2048,
            batch_size=256,
            repeats=3,
            drop_path=0.05,
            image_size=224,
            val_image_size=224,
            resize_size=224,
            interpolation="bicubic",
            augment="three+jitter:0.3",
            mixup=0.8,
            cutmix=1.0,
            loss="bce",
            bce_threshold=0.0,
            label_smoothing=0.0,
            optimizer="lamb",
            learning_rate=4e-3,
            weight_decay=0.05,
            warmup_epochs=5,
            warmup_start=2.5e-4,
            min_learning_rate=1e-5,
        ),
    )


def fashion() -> Recipe:
    """Return a recipe for Fashion-MNIST (Xiao et al., 2017): a Wide ResNet 16-8 on its images of 28 pixels.

    Published: top-1 96.7 % of a WRN40-4 with flips and crops, in the table of FASHION. No settings are published with
    it, so these are raydali's own, chosen on held-out training images: Muon with TrivialAugment, flips, erasing, label
    smoothing and a moving average. They give 96.24 +- 0.09 % (five seeds).
    """
    return Recipe(
        top1=0.967,
        measured_on="Fashion-MNIST, WRN40-4",
        source=FASHION,
        settings=Settings(
            model="wrn16_8",
            epochs=180,
            global_batch_size=512,
            batch_size=512,
            image_size=28,
            val_image_size=28,
            resize_size=28,
            random_area=(1.0, 1.0),
            augment="trivial",
            erase=0.5,
            tta="flip",
            optimizer="muon",
            learning_rate=0.004,
            weight_decay=0.05,
            warmup_epochs=5,
            ema_decay=0.998,
            ema_warmup=True,
        ),
    )


RECIPES: dict[str, Callable[[], Recipe]] = {
    "torchvision-v2": torchvision_v2,
    "a1": a1,
    "a2": a2,
    "a3": a3,
    "ffcv-16": ffcv_16,
    "ffcv-88": ffcv_88,
    "deit3-s": deit3_s,
    "fashion": fashion,
}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name.

    Raises:
        UsageError: there is none. The message suggests similar names.
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4) or RECIPES
        raise UsageError(f"--recipe {name} is unknown: try {' or '.join(near)}")
    return RECIPES[name]()


def micro_batch(global_batch_size: int, most: int, workers: int) -> int:
    """Return the largest divisor of a global batch that is at most `most`, and of which each worker gets at least one.

    With more workers than samples it is 1, which the stream refuses.
    """
    return largest_divisor(global_batch_size, max(1, min(most, global_batch_size // workers)))
