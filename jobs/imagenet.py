"""Train an image classifier on class folders, such as ImageNet, lists, tar shards, TFRecord or Parquet files.

    python jobs/imagenet.py                                          the built-in digits, on this machine
    python jobs/imagenet.py --data ~/pets                            class folders, of which a tenth validates
    python jobs/imagenet.py --data /data/imagenet --compile          train/ and val/ of class folders, or s3://, gs://
    python jobs/imagenet.py --data /data/imagenet --recipe a2        a published training
    python jobs/imagenet.py --data train.csv --val-data val.csv      lists: a line path,label for each image
    python jobs/imagenet.py --data table.csv --multi-label ...       lists with a column 0 or 1 for each label
    python jobs/imagenet.py --data 'train-{000..146}.tar' --val-data 'val-*.tar'      shards, as in WebDataset
    python jobs/imagenet.py --data 'train-*-of-*' --val-data 'validation-*-of-*'      TFRecord files
    python jobs/imagenet.py --data 'train-*.parquet' --val-data 'test-*.parquet'     Parquet, or its cloned folder
    ray job submit --working-dir . -- python jobs/imagenet.py ...    on a cluster

Every worker runs the training loop in `train`. The commands evaluate, predict, export and preview use the same
functions for data, network, pipelines and evaluation. For your own training, copy this file and change them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import raydali

if TYPE_CHECKING:
    from torch import nn

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(
    raydali.RecipeOptions,
    raydali.RegularizationOptions,
    raydali.ClassifierOptions,
    raydali.MultiLabelOptions,
    raydali.AugmentationOptions,
):
    """Train an image classifier with Ray Train and NVIDIA DALI, each sample exactly once."""

    smaller_data = "smaller images, as `raydali prepare` makes them"

    model: str = "resnet50"
    """Name of a torchvision classification model; timm:NAME; MODULE:FUNCTION, which is called with num_classes; or,
    for small images, wrn40_4, wrn16_8, resnet18_small, resnet9 or digits."""
    random_area: tuple[float, float] = (0.08, 1.0)
    """Training: smallest and largest area of a random crop, as a share of the image. Crops that do not fit are drawn
    again, so that a bound above 1 makes large ones rarer."""
    flip_probability: float = 0.5
    """Training: probability of a horizontal flip."""
    learning_rate: float | None = None
    """Peak learning rate, at the end of the warm-up. Default, per 256 images of the global batch: 0.1 with sgd, 0.0005
    with adamw and muon, 0.000625 with lamb, 0.3 with lars."""


DIGITS = Config(
    model="digits",
    image_size=32,
    resize_size=32,
    random_area=(0.6, 1.0),
    flip_probability=0.0,
    epochs=15,
    batch_size=32,
    learning_rate=0.1,
    label_smoothing=0.0,
    precision="fp32",
)
"""Defaults without --data."""

FINE_TUNING = Config(
    epochs=10,
    batch_size=32,
    optimizer="adamw",
    learning_rate=5e-4,
    weight_decay=0.01,
    random_area=(0.35, 1.0),
)
"""Defaults with --weights."""


# ---------------------------------------------------------------------------------------------------------------------
# Data, network and evaluation, for training and for all commands

Data = raydali.TrainAndVal[raydali.LabeledSource]


def open_data(config: Config) -> Data:
    """Index the training and the validation images, without those that are excluded."""
    images = raydali.open_labeled(config.data or raydali.digits_folder(), **config.reading)
    return Data(*raydali.exclude(config.exclude, *images))


def build_model(config: Config, classes: int) -> "nn.Module":
    """Build the model, with random weights."""
    return raydali.build_classifier(config.model, classes, config.validation_size, drop_path=config.drop_path)


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return the model with what it does to 8-bit images: normalisation, and in validation `--tta`."""
    return raydali.Normalized(model, config.mean, config.std, mirrored=config.tta == "flip")


def train_pipeline(config: Config) -> raydali.TrainImages:
    """Make the pipeline of training images."""
    return raydali.TrainImages(
        seed=config.seed,
        random_area=config.random_area,
        flip_probability=config.flip_probability,
        augmentation=config.augmentation,
        image_size=config.image_sizes.first,
        image_sizes=config.image_sizes,
        **config.inputs,
    )


def val_pipeline(config: Config) -> raydali.ValidationImages:
    """Make the pipeline of validation images."""
    return raydali.ValidationImages(image_size=config.validation_size, resize_size=config.resize_size, **config.inputs)


def evaluate(config: Config, network: "nn.Module", val: "raydali.ValidationPass") -> Mapping[str, Any]:
    """Return the figures of a network on batches of validation images."""
    if config.multi_label:
        return raydali.evaluate_labels(network, val.batches, val.worker, val.precision)
    return raydali.evaluate_classifier(network, val.batches, val.worker, val.precision)


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "raydali.Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver does not need this slow import; without it, a mistyped option is reported at once.
    import torch

    if config.data is None:  # each node writes its own copy
        data = data.relocate(raydali.digits_folder())
    run = raydali.TrainingRun(config, session, samples=len(data.train), labels=data.train.one_each)
    device, classes = run.worker.device, len(data.train.classes)
    model = run.prepared(partial(build_model, config, classes)).to(memory_format=torch.channels_last)
    # Make the average before SyncBatchNorm, whose process group cannot be copied. It is only used in validation.
    ema = raydali.MovingAverage(model, config.ema_decay, warmup=config.ema_warmup) if config.ema_decay else None
    model = run.synchronized(model)
    peak = config.peak(run.stream.global_batch_size)
    settings = config.optimizer_settings(partial(build_model, config), classes)
    optimizer = raydali.build_optimizer(model=model, learning_rate=peak, **settings)
    run.register_state(model=model, optimizer=optimizer, ema=ema)

    mix = raydali.mixing(config.mixup, config.cutmix, classes)
    criterion = raydali.classification_loss(data.train.labels, classes, **config.weighting).to(device)
    trained = network(model, config).to(device)
    differentiated = run.differentiated(model, lambda images, labels: criterion(trained(images), labels))
    weights = ema.module if ema else model
    evaluated = run.inference(network(weights, config).to(device))
    with run.loaders(data, (train_pipeline(config), val_pipeline(config))) as (loader, _):
        for step in run.steps(loader):
            raydali.set_learning_rate(optimizer, raydali.learning_rate(step.progress, peak=peak, **config.rates))
            for batch in step:
                step.backward(differentiated, *mix(batch["images"], batch["labels"]))
            step.update(optimizer, ema, max_norm=config.clip_grad)
            if step.ends_epoch:
                with run.validation() as val:
                    metrics = evaluate(config, evaluated, val)
                run.close_epoch(metrics, score="map" if config.multi_label else "top1", weights=weights)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def check(config: Config) -> None:
    """Refuse settings that do not fit together, before anything is started."""
    train_pipeline(config), val_pipeline(config)
    if config.model not in (DIGITS.model, Config.model) or config.drop_path is not None:
        sizes = dict.fromkeys([*config.image_sizes.all(config.epochs), config.validation_size])
        raydali.check_sizes(config.model, [*sizes], drop_path=config.drop_path)  # imports torchvision: seconds


def unchangeable(config: Config) -> list[str]:
    """Return the options that a resume must repeat, since the weights depend on them."""
    is_fixed = config.model != DIGITS.model and raydali.has_one_size(config.model)
    return ["recipe", "model", *config.changes_groups, *(["image_size"] if is_fixed else [])]


JOB = raydali.Job(
    name="imagenet",
    config=Config,
    open_data=open_data,
    build_model=build_model,
    network=network,
    train_pipeline=train_pipeline,
    val_pipeline=val_pipeline,
    evaluate=evaluate,
    train=train,
    task="classification",
    check=check,
    unchangeable=unchangeable,
    describe=lambda config, data: config.describe(data.train, data.val),
    demo=DIGITS,
    about_demo="this is the demo, on handwritten digits; --data DIR trains on images in a folder for each class",
    fine_tuning=FINE_TUNING,
)

if __name__ == "__main__":
    raydali.run_job(JOB)
