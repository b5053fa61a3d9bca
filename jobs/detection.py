"""Train a detector on images with boxes: COCO, or your own data in the format of COCO or YOLO.

    python jobs/detection.py                                     the built-in shapes, on this machine
    python jobs/detection.py --data /data/coco                   train2017/, val2017/ and annotations/, as in COCO
    python jobs/detection.py --data /data/fruit                  YOLO's data.yaml, with images/ and labels/
    python jobs/detection.py --data /images --annotations train.json --val-data /others --val-annotations val.json
    python jobs/detection.py --data ... --model fasterrcnn_resnet50_fpn --image-size 640 --batch-size 4

Images are fitted into squares. Every worker runs the training loop in `train`. The commands evaluate, predict and
preview use the same functions for data, network, pipelines and evaluation. For your own training, copy this file and
change them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import raydali

if TYPE_CHECKING:
    from torch import nn

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(raydali.FineTuningOptions, raydali.ImageOptions):
    """Train a detector with Ray Train and NVIDIA DALI, each image exactly once."""

    smaller_data = "images stored nearer to --image-size"
    usual_peaks: ClassVar = {**raydali.PEAKS, "sgd": 0.16, "adamw": 1.6e-3, "muon": 1.6e-3}

    data: str | None = None
    """Folder or URI (s3://, gs://) in COCO's layout: train/ and val/ (or train2017/ and val2017/), and annotations/; or
    in Roboflow's; or YOLO's data.yaml, or its folder. Default: the built-in shapes."""
    annotations: str | None = None
    """JSON file of the training images. --data then has these images only; --val-data and --val-annotations are
    required."""
    val_data: str | None = None
    """Folder or URI of the validation images, with --annotations."""
    val_annotations: str | None = None
    """JSON file of the validation images, with --annotations."""
    epochs: int = 26
    """Number of passes over the training images."""
    batch_size: int = 8
    """Images per micro-batch, which a device processes at once."""
    model: str = "fcos_resnet50_fpn"
    """Name of a torchvision detector, such as fasterrcnn_resnet50_fpn, or `tiny`, a small network."""
    image_size: int = 640
    """Height and width of the squares that images are fitted into, in pixels."""
    crop_probability: float = 0.5
    """Training: probability of a random crop."""
    random_area: tuple[float, float] = (0.3, 1.0)
    """Training: smallest and largest area of a random crop, as a share of the image."""
    flip_probability: float = 0.5
    """Training: probability of a horizontal flip."""
    learning_rate: float | None = None
    """Peak learning rate, at the end of the warm-up. Default: 0.01 per 16 images of the global batch, or 0.0001 with
    adamw and muon."""
    nesterov: bool = False
    """Nesterov's momentum; sgd and muon only."""
    weight_decay: float = 1e-4
    """Weight decay; by default not of normalisation layers and biases."""
    cuda_graph: bool = True
    """On GPUs, replay forward and backward of the backbone and of the heads behind it as CUDA graphs."""
    compile: bool = False
    """Not supported: a detector's shapes depend on the objects that it finds."""

    def __post_init__(self) -> None:
        """Check values; the sources, the stream and the pipelines check their own settings."""
        super().__post_init__()
        raydali.require_data(self, self.data, "annotations", "val_data", "val_annotations")
        if self.compile:
            raise raydali.UsageError("--compile does not suit detectors, whose shapes change: leave it out")


SHAPES = Config(
    model="tiny",
    image_size=128,
    epochs=10,
    batch_size=8,
    optimizer="adamw",
    learning_rate=3e-3,
    precision="fp32",
)
"""Defaults without --data."""


# ---------------------------------------------------------------------------------------------------------------------
# Data, network and evaluation, for training and for all commands

Data = raydali.TrainAndVal[raydali.Coco]


def open_data(config: Config) -> Data:
    """Index the images by their annotations, without those that are excluded."""
    data = config.data or raydali.shapes_folder()
    indexes = raydali.open_coco(data, config.annotations, config.val_data, config.val_annotations)
    return Data(*raydali.exclude(config.exclude, *indexes))


def build_model(config: Config, classes: int) -> "nn.Module":
    """Build the detector, with random weights."""
    return raydali.build_detector(config.model, classes)


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return the detector, which normalises 8-bit images itself."""
    return raydali.DetectorNetwork(model)


def train_pipeline(config: Config) -> raydali.TrainBoxes:
    """Make the pipeline of training images."""
    return raydali.TrainBoxes(
        seed=config.seed,
        image_size=config.image_size,
        crop_probability=config.crop_probability,
        random_area=config.random_area,
        flip_probability=config.flip_probability,
        **config.decoding,
    )


def val_pipeline(config: Config) -> raydali.ValidationBoxes:
    """Make the pipeline of validation images."""
    return raydali.ValidationBoxes(image_size=config.image_size, **config.decoding)


def evaluate(config: Config, network: "nn.Module", val: "raydali.ValidationPass") -> Mapping[str, Any]:
    """Return the figures of a network on batches of validation images."""
    return raydali.evaluate_detector(network, val.batches, val.source, val.worker, val.precision)


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "raydali.Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver does not need this slow import; without it, a mistyped option is reported at once.
    import torch

    if config.data is None:  # each node draws its own copy
        data = data.relocate(raydali.shapes_folder())
    run = raydali.TrainingRun(config, session, samples=len(data.train))
    model = run.prepared(partial(build_model, config, len(data.train.classes)))
    model = run.synchronized(model.to(memory_format=torch.channels_last))
    peak = config.peak(run.stream.global_batch_size)
    settings = config.optimizer_settings(partial(build_model, config), len(data.train.classes))
    optimizer = raydali.build_optimizer(model=model, learning_rate=peak, **settings)
    run.register_state(model=model, optimizer=optimizer)

    detector = network(model, config)
    differentiated = run.differentiated(model, raydali.detection_loss(detector), parts=raydali.constant_parts(model))
    with run.loaders(data, (train_pipeline(config), val_pipeline(config))) as (loader, _):
        for step in run.steps(loader):
            raydali.set_learning_rate(optimizer, raydali.learning_rate(step.progress, peak=peak, **config.rates))
            for batch in step:
                step.backward(differentiated, batch["images"], batch["boxes"], batch["labels"])
            step.update(optimizer, max_norm=config.clip_grad)
            if step.ends_epoch:
                with run.validation() as val:
                    metrics = evaluate(config, detector, val)
                run.close_epoch(metrics, score="map", weights=model)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def check(config: Config) -> None:
    """Refuse settings that do not fit together, before anything is started."""
    raydali.require_extra("detection", "faster_coco_eval", "detectors")
    train_pipeline(config), val_pipeline(config)
    if config.model not in (SHAPES.model, Config.model):
        raydali.check_detector(config.model)  # imports torchvision: seconds


def describe(config: Config, data: Data) -> str:
    """Describe the data for the console."""
    images = f"{raydali.plural(len(data.train), 'training image')}, {raydali.plural(len(data.val), 'validation image')}"
    boxes = raydali.plural(len(data.train.boxes) + len(data.val.boxes), "box")
    return f"{images}, {boxes}, {raydali.plural(len(data.train.classes), 'class')}"


JOB = raydali.Job(
    name="detection",
    config=Config,
    open_data=open_data,
    build_model=build_model,
    network=network,
    train_pipeline=train_pipeline,
    val_pipeline=val_pipeline,
    evaluate=evaluate,
    train=train,
    task="detection",
    check=check,
    unchangeable=lambda config: ("model", *config.changes_groups),
    describe=describe,
    demo=SHAPES,
    about_demo="this is the demo, on drawn shapes; --data DIR trains on images in a folder like COCO's or YOLO's",
)

if __name__ == "__main__":
    raydali.run_job(JOB)
