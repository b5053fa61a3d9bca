"""Train a network for semantic segmentation on images with masks.

    python jobs/segmentation.py                                       the built-in shapes, on this machine
    python jobs/segmentation.py --data /data/cells --classes 3        train/ and val/ with images/ and masks/
    python jobs/segmentation.py --data train.csv --val-data val.csv --classes names.txt      lines image,mask
    python jobs/segmentation.py --data /data/VOC2012 --model fcn_resnet50                    or Cityscapes, ADE20K

Images are scaled, cropped and flipped together with their masks, whose classes never blend, and evaluated whole. Every
worker runs the training loop in `train`. The commands evaluate, predict, export and preview use the same functions for
data, network, pipelines and evaluation. For your own training, copy this file and change them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import raydali

if TYPE_CHECKING:
    import torch
    from torch import nn

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(raydali.FineTuningOptions, raydali.ImageOptions, raydali.SplitOptions):
    """Train a segmentation network with Ray Train and NVIDIA DALI, each image exactly once."""

    smaller_data = "images stored nearer to --base-size"
    usual_peaks: ClassVar = {**raydali.PEAKS, "sgd": 0.16}

    data: str | None = None
    """Folder or URI (s3://, gs://) with train/ and val/, each with images/ and masks/, or with these themselves; Pascal
    VOC, Cityscapes or ADE20K as they are unpacked; or a list with a line image,mask for each image. Default: the
    built-in shapes."""
    val_data: str | None = None
    """Validation images, a list or a folder with images/ and masks/; --data then has the training images only."""
    root: str | None = None
    """Folder or URI that relative paths in lists start from. Default: the list's folder."""
    images: str = "images"
    """Folder of the images, within train/ and val/, or within --data."""
    masks: str = "masks"
    """Folder of the masks. A mask has the path of its image, with any extension."""
    classes: str | None = None
    """Number of classes, or a file with a name in each line. Default: the classes of VOC, Cityscapes and ADE20K, or as
    many as the palette of the first mask has colours."""
    ignore_index: int = raydali.IGNORED
    """Value of pixels in masks that count for nothing."""
    mask_values: tuple[int, ...] | None = None
    """Values of the classes 0, 1, ... in masks, such as 0 255. Default: 0, 1, ..., or the data set's values."""
    model: str = "deeplabv3_resnet50"
    """Name of a torchvision segmentation model, such as fcn_resnet50 or lraspp_mobilenet_v3_large; `tiny`, a small
    network; or `package.module:factory`."""
    crop_size: int = 480
    """Training: height and width of the random crops, in pixels."""
    base_size: int = 520
    """Training: length of the shorter side of an image at a scale of 1, in pixels."""
    scales: tuple[float, float] = (0.5, 2.0)
    """Training: smallest and largest random scale."""
    flip_probability: float = 0.5
    """Training: probability of a horizontal flip."""
    jitter: float = 0.0
    """Training: largest change of an image's brightness, contrast and saturation, as a share."""
    val_size: tuple[int, int] = (512, 512)
    """Validation: height and width in pixels of the canvas that holds each image at its own size; no image may be
    larger. What an image leaves of it is ignored."""
    loss: Literal["ce", "dice"] = "ce"
    """Training loss: ce, cross-entropy; or dice, which adds a Dice loss to it, mean over the classes of each image."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of classes in the cross-entropy; balanced: in proportion to the inverse of their number of pixels."""
    auxiliary: float = 0.5
    """Weight of the auxiliary head in the loss, if the model has one."""
    epochs: int = 30
    """Number of passes over the training images."""
    batch_size: int = 8
    """Images per micro-batch, which a device processes at once."""
    learning_rate: float | None = None
    """Peak learning rate, at the end of the warm-up. Default: 0.01 per 16 images of the global batch, or 0.0001 with
    adamw and muon."""
    weight_decay: float = 1e-4
    """Weight decay; by default not of normalisation layers and biases."""

    def __post_init__(self) -> None:
        """Check values; the sources, the stream and the pipelines check their own settings."""
        super().__post_init__()
        raydali.require_data(self, self.data, "val_data", "root", "classes", "mask_values")
        raydali.require(self, "ignore_index", least=0, most=65535)
        raydali.require(self, "auxiliary", least=0)


SHAPES = Config(
    model="tiny",
    crop_size=112,
    base_size=128,
    scales=(0.9, 1.1),
    val_size=(160, 160),
    epochs=20,
    batch_size=8,
    optimizer="adamw",
    learning_rate=2e-3,
    weight_decay=0.05,
    precision="fp32",
)
"""Defaults without --data."""


# ---------------------------------------------------------------------------------------------------------------------
# Data, network and evaluation, for training and for all commands

Data = raydali.TrainAndVal[raydali.MaskedImages]


def open_data(config: Config) -> Data:
    """Index the images and their masks, without those that are excluded."""
    root, classes = config.data, config.classes
    if root is None:
        root = raydali.masked_shapes_folder()
        classes = f"{root}/classes.txt"
    pairs = raydali.open_masked(
        root,
        config.val_data,
        images=config.images,
        masks=config.masks,
        classes=classes,
        ignored=config.ignore_index,
        values=config.mask_values,
        root=config.root,
        **config.splitting,
    )
    return Data(*raydali.exclude(config.exclude, *pairs))


def build_model(config: Config, classes: int) -> "nn.Module":
    """Build the model for a number of classes, with random weights."""
    return raydali.build_segmenter(config.model, classes)


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return what takes 8-bit images, and returns scores (N, classes, H, W)."""
    return raydali.Normalized(raydali.WithAuxiliary(model))


def train_pipeline(config: Config) -> raydali.TrainMasks:
    """Make the pipeline of training images."""
    return raydali.TrainMasks(
        canvas=(config.crop_size, config.crop_size),
        base_size=config.base_size,
        scales=config.scales,
        jitter=config.jitter,
        seed=config.seed,
        flip_probability=config.flip_probability,
        **config.decoding,
    )


def val_pipeline(config: Config) -> raydali.ValidationMasks:
    """Make the pipeline of validation images."""
    return raydali.ValidationMasks(canvas=config.val_size, **config.decoding)


def evaluate(config: Config, network: "nn.Module", val: "raydali.ValidationPass") -> Mapping[str, Any]:
    """Return the figures of a network: "iou", "accuracy" and "loss"."""
    return raydali.evaluate_segmenter(network, val, len(val.source.classes))


def predictions(config: Config, scores: "torch.Tensor", paths: Sequence[str]) -> Mapping[str, bytes]:
    """Return the predicted masks as PNG files of class indices, for `raydali predict`."""
    return raydali.mask_files(scores, paths)


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "raydali.Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver does not need this slow import; without it, a mistyped option is reported at once.
    import torch

    if config.data is None:  # each node writes its own copy
        data = data.relocate(raydali.masked_shapes_folder())
    run = raydali.TrainingRun(config, session, samples=len(data.train))
    device, classes = run.worker.device, len(data.train.classes)
    model = run.synchronized(run.prepared(partial(build_model, config, classes)).to(memory_format=torch.channels_last))
    peak = config.peak(run.stream.global_batch_size)
    settings = config.optimizer_settings(lambda count: build_model(config, count), classes)
    optimizer = raydali.build_optimizer(model=model, learning_rate=peak, **settings)
    run.register_state(model=model, optimizer=optimizer)

    trained = network(model, config).to(device)
    weights = raydali.balanced_pixel_weights(data.train, run.worker) if config.class_weights == "balanced" else None

    def loss(images: "torch.Tensor", masks: "torch.Tensor") -> "torch.Tensor":
        return raydali.segmentation_loss(trained(images), masks, weights, config.auxiliary, dice=config.loss == "dice")

    differentiated = run.differentiated(model, loss)
    evaluated = run.inference(trained)
    with run.loaders(data, (train_pipeline(config), val_pipeline(config))) as (loader, _):
        for step in run.steps(loader):
            raydali.set_learning_rate(optimizer, raydali.learning_rate(step.progress, peak=peak, **config.rates))
            for batch in step:
                step.backward(differentiated, batch["images"], batch["masks"])
            step.update(optimizer, max_norm=config.clip_grad)
            if step.ends_epoch:
                with run.validation() as val:
                    metrics = evaluate(config, evaluated, val)
                run.close_epoch(metrics, score="iou", weights=model)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def check(config: Config) -> None:
    """Refuse settings that do not fit together, before anything is started."""
    train_pipeline(config), val_pipeline(config)
    if config.model not in (SHAPES.model, Config.model):
        raydali.check_segmenter(config.model)  # imports torchvision: seconds


def describe(config: Config, data: Data) -> str:
    """Describe the data for the console."""
    images = f"{raydali.plural(len(data.train), 'training image')}, {raydali.plural(len(data.val), 'validation image')}"
    return f"{images} with masks, {raydali.plural(len(data.train.classes), 'class')}"


JOB = raydali.Job(
    name="segmentation",
    config=Config,
    open_data=open_data,
    build_model=build_model,
    network=network,
    train_pipeline=train_pipeline,
    val_pipeline=val_pipeline,
    evaluate=evaluate,
    train=train,
    task="segmentation",
    predictions=predictions,
    check=check,
    unchangeable=lambda config: ("model", *config.changes_groups),
    describe=describe,
    demo=SHAPES,
    about_demo="this is the demo, on drawn shapes; --data DIR trains on images and masks of your own",
)

if __name__ == "__main__":
    raydali.run_job(JOB)
