"""Train a segmentation network on photographs and masks of the same name, whose pixel values are classes.

Usage: python docs/examples/segmentation.py --data FOLDER

FOLDER has train/ and val/, each with images/ and masks/.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from raydali.data.sources.exclusion import exclude
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.source import TrainAndVal
from raydali.data.tasks.masks import TrainMasks, ValidationMasks
from raydali.launch.driver.command import run_job
from raydali.launch.job import Job
from raydali.launch.optimizer_options import OptimizerOptions
from raydali.launch.options import ImageOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from raydali.launch.worker.session import Session
    from raydali.train.evaluation.validation import ValidationPass

Data = TrainAndVal[ImagePairs]


@dataclass(frozen=True, kw_only=True)
class Config(OptimizerOptions, ImageOptions):
    """Train a segmentation network."""

    data: str
    """Folder with train/ and val/, each with images/ and masks/."""
    classes: int = 2
    """Number of classes; other values of masks do not count."""
    side: int = 256
    """Height and width of the squares that are trained on, in pixels."""
    model: Literal["lraspp_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50"] = "lraspp_mobilenet_v3_large"
    """Name of a segmentation model of torchvision."""


# docs/own-data.md shows this part


def open_data(config: Config) -> Data:
    """Open the pairs of both sets."""
    pairs = [ImagePairs.scan(f"{config.data}/{split}", inputs="images", targets="masks") for split in ("train", "val")]
    return Data(*exclude(config.exclude, *pairs))


def build_model(config: Config, _classes: int) -> "nn.Module":
    """Build the model; `ImagePairs` knows no classes."""
    from torchvision.models import get_model

    model: nn.Module = get_model(config.model, weights=None, weights_backbone=None, num_classes=config.classes)
    return model


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return what takes 8-bit images, and returns scores (N, classes, H, W)."""
    from raydali.train.models.normalized import Normalized, Scores

    return Normalized(Scores(model))


def val_pipeline(config: Config) -> ValidationMasks:
    """Make the pipeline of validation samples."""
    return ValidationMasks(side=config.side, **config.decoding)


def evaluate(config: Config, network: "nn.Module", val: "ValidationPass") -> Mapping[str, Any]:
    """Return "iou" and "accuracy"."""
    from raydali.train.evaluation import classification

    return classification.evaluate_masks(network, val, config.classes)


def predictions(config: Config, scores: "torch.Tensor", paths: Sequence[str]) -> dict[str, bytes]:
    """Return a mask for each photograph, as PNG."""
    from PIL import Image

    files = {}
    for path, mask in zip(paths, scores.argmax(1).byte().cpu().numpy(), strict=True):
        content = io.BytesIO()
        Image.fromarray(mask).save(content, "PNG")
        files[f"{path}.png"] = content.getvalue()
    return files


# to here


def train_pipeline(config: Config) -> TrainMasks:
    """Make the pipeline of training samples."""
    return TrainMasks(side=config.side, seed=config.seed, **config.decoding)


def train(config: Config, data: Data, session: "Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    from torch.nn import functional as F

    from raydali.launch.worker.training_run import TrainingRun
    from raydali.train.optim import build_optimizer, learning_rate, set_learning_rate

    run = TrainingRun(config, session, samples=len(data.train))
    model = run.synchronized(build_model(config, 0).to(run.worker.device))
    peak = config.peak(run.stream.global_batch_size)
    settings = config.optimizer_settings(lambda _: build_model(config, 0), 0)
    optimizer = build_optimizer(model=model, learning_rate=peak, **settings)
    run.register_state(model=model, optimizer=optimizer)
    trained = network(model, config).to(run.worker.device)

    def loss(images: "torch.Tensor", masks: "torch.Tensor") -> "torch.Tensor":
        masks = masks.squeeze(1).long()
        return F.cross_entropy(trained(images), masks.where(masks < config.classes, -100))

    differentiated = run.differentiated(model, loss)
    evaluated = run.inference(trained)
    with run.loaders(data, (train_pipeline(config), val_pipeline(config))) as (loader, _):
        for step in run.steps(loader):
            set_learning_rate(optimizer, learning_rate(step.progress, peak=peak, **config.rates))
            for batch in step:
                step.backward(differentiated, batch["images"], batch["masks"])
            step.update(optimizer, max_norm=config.clip_grad)
            if step.ends_epoch:
                with run.validation() as val:
                    metrics = evaluate(config, evaluated, val)
                run.close_epoch(metrics, score="iou", weights=model)


JOB = Job(
    name="segmentation",
    config=Config,
    open_data=open_data,
    build_model=build_model,
    network=network,
    train_pipeline=train_pipeline,
    val_pipeline=val_pipeline,
    evaluate=evaluate,
    predictions=predictions,
    train=train,
)

if __name__ == "__main__":
    run_job(JOB)
