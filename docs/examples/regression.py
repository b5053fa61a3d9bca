"""Train a network that estimates a number for each image, such as an age or a weight.

Usage: python docs/examples/regression.py --data FOLDER

FOLDER has train.csv and val.csv, with a line path,number for each image.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import raydali

if TYPE_CHECKING:
    import torch
    from torch import nn

Data = raydali.TrainAndVal[raydali.LabeledFiles]


@dataclass(frozen=True, kw_only=True)
class Config(raydali.ScheduleOptions, raydali.ImageOptions):
    """Train a network that estimates a number for each image."""

    data: str
    """Folder or URI (s3://, gs://) with train.csv and val.csv, whose paths start from it."""
    image_size: int = 224
    """Height and width of the network's images, in pixels."""
    model: str = "resnet18"
    """Name of a classification model, as jobs/imagenet.py takes it."""


def open_data(config: Config) -> Data:
    """Index the images of both lists; their labels are the numbers, float32 (N, 1)."""
    sources, root = [], raydali.absolute(config.data)
    for split in ("train", "val"):
        lines = raydali.read_lines(f"{root}/{split}.csv", root)
        numbers = np.array([[float(name)] for name in lines.names], np.float32)
        sources.append(raydali.LabeledFiles(*lines.paths.packed(), labels=numbers[lines.labels], classes=()))
    return Data(*raydali.exclude(config.exclude, *sources))


def build_model(config: Config, classes: int = 0) -> "nn.Module":
    """Build the model, which has one output."""
    return raydali.build_classifier(config.model, 1, config.image_size)


def evaluate(config: Config, network: "nn.Module", val: "raydali.ValidationPass") -> Mapping[str, Any]:
    """Return "rmse", the root of the mean squared error, and "r2", the share of the variance that is explained."""
    import torch

    sums = torch.zeros(4, dtype=torch.float64, device=val.worker.device)
    with torch.inference_mode(), raydali.evaluating(network):
        for batch in val.batches:
            with val.precision.autocast():
                outputs = network(batch["images"])
            numbers = batch["labels"].double()
            sums += torch.stack([torch.ones_like(numbers), numbers, numbers**2, (outputs - numbers) ** 2]).sum((1, 2))
    images, total, squares, errors = val.worker.sum(sums)
    raydali.require_read(images.item(), val.batches)
    r2 = 1 - errors / (squares - total**2 / images)
    return {"images": int(images), "rmse": (errors / images).sqrt().item(), "r2": r2.item()}


def predictions(config: Config, outputs: "torch.Tensor", paths: Sequence[str]) -> Mapping[str, Sequence[float]]:
    """Return the numbers, a column beside the paths."""
    return {"number": outputs[:, 0].tolist()}


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return what takes 8-bit images, and returns their numbers (N, 1)."""
    return raydali.Normalized(model)


def train_pipeline(config: Config) -> raydali.TrainImages:
    """Make the pipeline of training images."""
    return raydali.TrainImages(
        image_size=config.image_size, seed=config.seed, random_area=(0.6, 1.0), **config.decoding
    )


def val_pipeline(config: Config) -> raydali.ValidationImages:
    """Make the pipeline of validation images."""
    return raydali.ValidationImages(image_size=config.image_size, **config.decoding)


def train(config: Config, data: Data, session: "raydali.Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    from torch.nn import functional as F

    run = raydali.TrainingRun(config, session, samples=len(data.train))
    model = run.synchronized(build_model(config).to(run.worker.device))
    peak = config.learning_rate or 1e-3
    optimizer = raydali.build_optimizer("adamw", model, learning_rate=peak, weight_decay=config.weight_decay)
    run.register_state(model=model, optimizer=optimizer)
    trained = network(model, config).to(run.worker.device)
    differentiated = run.differentiated(model, lambda images, numbers: F.l1_loss(trained(images), numbers))
    evaluated = run.inference(trained)
    with run.loaders(data, (train_pipeline(config), val_pipeline(config))) as (loader, _):
        for step in run.steps(loader):
            raydali.set_learning_rate(optimizer, raydali.learning_rate(step.progress, peak=peak, **config.rates))
            for batch in step:
                step.backward(differentiated, batch["images"], batch["labels"])
            step.update(optimizer, max_norm=config.clip_grad)
            if step.ends_epoch:
                with run.validation() as val:
                    metrics = evaluate(config, evaluated, val)
                run.close_epoch(metrics, score="r2", weights=model)


JOB = raydali.Job(
    name="regression",
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
    raydali.run_job(JOB)
