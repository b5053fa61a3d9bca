"""The recipes' settings against their anchors, option by option: see anchors.py."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from raydali.training.recipe import RECIPES, Settings, find_recipe
from tests.training.recipes import anchors
from tests.training.recipes.anchors import Table

PAGE = Path(__file__).parents[3] / "docs/recipes.md"
Rule = Callable[[Table], Mapping[str, object]]


@dataclass(frozen=True)
class Translation:
    """How the options of a script are said in raydali's settings; each option has exactly one place.

    Attributes:
        rules: what options become; a rule sees the table, since some options say only together what is meant.
        used: options that rules of others use; a text of words, as the next.
        otherwise: options that raydali follows otherwise, on purpose: docs/recipes.md says how.
    """

    rules: Mapping[str, Rule]
    used: str
    otherwise: str

    def of(self, table: Table) -> dict[str, object]:
        """Return the settings that a table means; each option must have a place, and settings one value."""
        assert sorted([*self.rules, *self.used.split(), *self.otherwise.split()]) == sorted(table)
        result: dict[str, object] = {}
        for rule in self.rules.values():
            for name, value in rule(table).items():
                assert name not in result, name
                result[name] = value
        return result


def same(option: str, *settings: str) -> Rule:
    return lambda table: dict.fromkeys(settings, table[option])


def per_gpu(option: str, gpus: str) -> Rule:
    def batch(table: Mapping[str, Any]) -> dict[str, object]:
        return {"batch_size": table[option], "global_batch_size": table[option] * table[gpus]}

    return batch


def chosen(option: str, meanings: Mapping[object, Mapping[str, object]]) -> Rule:
    return lambda table: meanings[table[option]]


def from_warmup_lr(table: Mapping[str, Any]) -> dict[str, object]:
    return {"warmup_start": table["--warmup-lr"] / table["--lr"]}


def torchvision_average(table: Mapping[str, Any]) -> dict[str, object]:
    """See `adjust` in train.py; the update of --model-ema-steps steps is spread over them."""
    steps, images = table["--model-ema-steps"], table["gpus"] * table["--batch-size"]
    update = (1 - table["--model-ema-decay"]) * images * steps / table["--epochs"]
    return {"ema_decay": (1 - update) ** (1 / steps)}


def ffcv_model(table: Table) -> dict[str, object]:
    model = table["model.arch"]
    return {"model": f"raydali.training.models.blur_pool:{model}" if table["training.use_blurpool"] else model}


def ffcv_sizes(table: Table) -> dict[str, object]:
    first, last, begin, end = (table[f"resolution.{name}"] for name in ("min_res", "max_res", "start_ramp", "end_ramp"))
    return {"image_size": f"{first}:{last}@{begin}-{end}"}


def ffcv_validation(table: Mapping[str, Any]) -> dict[str, object]:
    """Crops have DEFAULT_CROP_RATIO, 224 / 256, of the shorter side, and are resized to the resolution."""
    size = table["validation.resolution"]
    return {"val_image_size": size, "resize_size": round(size * 256 / 224)}


def timm_crop(table: Mapping[str, Any]) -> dict[str, object]:
    """Validation is at 224 pixels in all procedures, out of `math.floor(224 / crop_pct)`."""
    return {"val_image_size": 224, "resize_size": int(224 / table["--crop-pct"])}


def deit_augmentation(table: Table) -> dict[str, object]:
    """ThreeAugment replaces --aa."""
    assert table["--ThreeAugment"]
    return {"augment": f"three+jitter:{table['--color-jitter']}"}


def deit_sizes(table: Mapping[str, Any]) -> dict[str, object]:
    size = table["--input-size"]
    return {"image_size": size, "val_image_size": size, "resize_size": int(size / table["--eval-crop-ratio"])}


TORCHVISION = Translation(
    rules={
        "--model": same("--model", "model"),
        "--batch-size": per_gpu("--batch-size", "gpus"),
        "--epochs": same("--epochs", "epochs"),
        "--opt": chosen("--opt", {"sgd": {"optimizer": "sgd", "nesterov": False}}),
        "--lr": same("--lr", "learning_rate"),
        "--momentum": same("--momentum", "momentum"),
        "--weight-decay": same("--weight-decay", "weight_decay"),
        "--norm-weight-decay": chosen("--norm-weight-decay", {0.0: {"no_decay": "norms"}}),
        "--label-smoothing": same("--label-smoothing", "label_smoothing"),
        "--mixup-alpha": same("--mixup-alpha", "mixup"),
        "--cutmix-alpha": same("--cutmix-alpha", "cutmix"),
        "--lr-scheduler": chosen(
            "--lr-scheduler", {"cosineannealinglr": {"schedule": "cosine", "min_learning_rate": 0.0}}
        ),
        "--lr-warmup-epochs": same("--lr-warmup-epochs", "warmup_epochs"),
        "--lr-warmup-decay": same("--lr-warmup-decay", "warmup_start"),
        "--sync-bn": same("--sync-bn", "sync_bn"),
        "--auto-augment": chosen("--auto-augment", {"ta_wide": {"augment": "trivial"}}),
        "--random-erase": same("--random-erase", "erase"),
        "--model-ema": same("--model-ema", "ema_warmup"),
        "--model-ema-decay": torchvision_average,
        "--interpolation": same("--interpolation", "interpolation", "augment_interpolation"),
        "--val-resize-size": same("--val-resize-size", "resize_size"),
        "--val-crop-size": same("--val-crop-size", "val_image_size"),
        "--train-crop-size": same("--train-crop-size", "image_size"),
        "--clip-grad-norm": same("--clip-grad-norm", "clip_grad"),
        "--weights": same("--weights", "weights"),
        "--ra-reps": lambda table: {"repeats": table["--ra-reps"] if table["--ra-sampler"] else 1},
    },
    used="gpus --ra-sampler",
    otherwise="--amp --model-ema-steps",
)

TIMM = Translation(
    rules={
        "--model": lambda table: {"model": f"timm:{table['--model']}"},
        "--img-size": same("--img-size", "image_size"),
        "--crop-pct": timm_crop,
        "--epochs": same("--epochs", "epochs"),
        "--batch-size": per_gpu("--batch-size", "gpus"),
        "--opt": chosen("--opt", {"lamb": {"optimizer": "lamb", "no_decay": "norms-and-biases"}}),
        "--lr": same("--lr", "learning_rate"),
        "--sched": same("--sched", "schedule"),
        "--weight-decay": same("--weight-decay", "weight_decay"),
        "--warmup-epochs": same("--warmup-epochs", "warmup_epochs"),
        "--smoothing": same("--smoothing", "label_smoothing"),
        "--drop-path": lambda table: {"drop_path": table["--drop-path"] or None},
        "--aug-repeats": lambda table: {"repeats": table["--aug-repeats"] or 1},
        "--clip-grad": same("--clip-grad", "clip_grad"),
        "--hflip": same("--hflip", "flip_probability"),
        "--scale": same("--scale", "random_area"),
        "--aa": same("--aa", "augment"),
        "--mixup": same("--mixup", "mixup"),
        "--cutmix": same("--cutmix", "cutmix"),
        "--reprob": same("--reprob", "erase"),
        "--model-ema": chosen("--model-ema", {False: {"ema_decay": 0.0, "ema_warmup": False}}),
        "--bce-loss": chosen("--bce-loss", {True: {"loss": "bce"}}),
        "--warmup-lr": from_warmup_lr,
        "--min-lr": same("--min-lr", "min_learning_rate"),
        "--bce-target-thresh": same("--bce-target-thresh", "bce_threshold"),
        "--interpolation": same("--interpolation", "interpolation"),
        "--sync-bn": same("--sync-bn", "sync_bn"),
    },
    used="gpus",
    otherwise="--amp --train-interpolation --warmup-prefix --sched-on-updates",
)

FFCV = Translation(
    rules={
        "model.arch": ffcv_model,
        "model.pretrained": chosen("model.pretrained", {0: {"weights": None}}),
        "resolution.min_res": ffcv_sizes,
        "lr.lr": same("lr.lr", "learning_rate"),
        "lr.lr_peak_epoch": same("lr.lr_peak_epoch", "warmup_epochs"),
        "lr.lr_schedule_type": chosen(
            "lr.lr_schedule_type", {"cyclic": {"schedule": "poly:1", "warmup_start": 1e-4, "min_learning_rate": 0.0}}
        ),
        "training.batch_size": per_gpu("training.batch_size", "dist.world_size"),
        "training.bn_wd": chosen("training.bn_wd", {0: {"no_decay": "norms"}}),
        "training.epochs": same("training.epochs", "epochs"),
        "training.label_smoothing": same("training.label_smoothing", "label_smoothing"),
        "training.momentum": same("training.momentum", "momentum"),
        "training.optimizer": chosen("training.optimizer", {"sgd": {"optimizer": "sgd", "nesterov": False}}),
        "training.weight_decay": same("training.weight_decay", "weight_decay"),
        "validation.resolution": ffcv_validation,
        "validation.lr_tta": chosen("validation.lr_tta", {True: {"tta": "flip"}}),
    },
    used="training.use_blurpool dist.world_size resolution.max_res resolution.start_ramp resolution.end_ramp",
    otherwise="write_imagenet.sh",
)

DEIT = Translation(
    rules={
        "--batch-size": per_gpu("--batch-size", "gpus"),
        "--epochs": same("--epochs", "epochs"),
        "--bce-loss": chosen("--bce-loss", {True: {"loss": "bce", "bce_threshold": 0.0}}),  # engine.py: targets.gt(0.0)
        "--model": chosen("--model", {"deit_small_patch16_LS": {"model": "timm:deit3_small_patch16_224"}}),
        "--input-size": deit_sizes,
        "--drop-path": same("--drop-path", "drop_path"),
        "--opt": chosen("--opt", {"fusedlamb": {"optimizer": "lamb", "no_decay": "norms-and-biases"}}),
        "--clip-grad": same("--clip-grad", "clip_grad"),
        "--weight-decay": same("--weight-decay", "weight_decay"),
        "--sched": same("--sched", "schedule"),
        "--lr": same("--lr", "learning_rate"),
        "--warmup-lr": from_warmup_lr,
        "--min-lr": same("--min-lr", "min_learning_rate"),
        "--warmup-epochs": same("--warmup-epochs", "warmup_epochs"),
        "--ThreeAugment": deit_augmentation,
        "--smoothing": same("--smoothing", "label_smoothing"),
        "--train-interpolation": same("--train-interpolation", "interpolation"),
        "--repeated-aug": chosen("--repeated-aug", {True: {"repeats": 3}}),  # samplers.py: num_repeats
        "--reprob": same("--reprob", "erase"),
        "--mixup": same("--mixup", "mixup"),
        "--cutmix": same("--cutmix", "cutmix"),
        "--finetune": chosen("--finetune", {"": {"weights": None}}),
        "--attn-only": chosen("--attn-only", {False: {"freeze": None}}),
    },
    used="gpus --eval-crop-ratio --color-jitter",
    otherwise="--opt-eps --model-ema --model-ema-decay",
)

ANCHORS: dict[str, tuple[Translation, Table]] = {
    "torchvision-v2": (TORCHVISION, anchors.TORCHVISION_V2),
    "a1": (TIMM, anchors.A1),
    "a2": (TIMM, anchors.A2),
    "a3": (TIMM, anchors.A3),
    "ffcv-16": (FFCV, anchors.FFCV_16),
    "ffcv-88": (FFCV, anchors.FFCV_88),
    "deit3-s": (DEIT, anchors.DEIT3_S),
}


def test_every_recipe_with_published_settings_has_an_anchor() -> None:
    assert RECIPES.keys() - ANCHORS.keys() == {"fashion"}


@pytest.mark.parametrize("name", ANCHORS)
def test_a_recipe_has_the_settings_of_its_anchor(name: str) -> None:
    translation, table = ANCHORS[name]
    expected, options = translation.of(table), find_recipe(name).options()
    for setting, value in expected.items():
        assert options[setting] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), setting
    defaults = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    assert {setting for setting in options.keys() - expected.keys() if options[setting] != defaults[setting]} == set()


@pytest.mark.parametrize("name", ANCHORS)
def test_the_page_names_what_is_done_otherwise(name: str) -> None:
    page = PAGE.read_text()
    for option in ANCHORS[name][0].otherwise.split():
        assert f"`{option}`" in page, option
