"""Train a detector on images with boxes: COCO, or your own data in COCO's format.

    python jobs/detection.py                                     the built-in shapes, on this machine
    python jobs/detection.py --data /data/coco                   train2017/, val2017/ and annotations/, as in COCO
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

from raydali.data.builtin.shapes import shapes_folder
from raydali.data.index.coco import Coco
from raydali.data.index.coco_folder import train_and_val
from raydali.data.index.exclusion import exclude
from raydali.data.index.source import TrainAndVal
from raydali.data.tasks.detection import TrainImages, ValidationImages
from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.launch.driver.command import run_job
from raydali.launch.job import Job
from raydali.launch.options import ImageOptions
from raydali.launch.shared_options import FineTuningOptions, require_data
from raydali.text import plural
from raydali.training.learning_rates import PEAKS

if TYPE_CHECKING:
    from torch import nn

    from raydali.launch.worker.session import Session
    from raydali.training.evaluation.validation import ValidationPass

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(FineTuningOptions, ImageOptions):
    """Train a detector with Ray Train and NVIDIA DALI, each image exactly once."""

    smaller_data = "images stored nearer to --image-size"
    usual_peaks: ClassVar = {**PEAKS, "sgd": 0.16, "adamw": 1.6e-3, "muon": 1.6e-3}

    data: str | None = None
    """Folder or URI (s3://, gs://) in COCO's layout: train/ and val/ (or train2017/ and val2017/), and annotations/; or
    in Roboflow's. Default: the built-in shapes."""
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
        require_data(self, self.data, "annotations", "val_data", "val_annotations")
        if self.compile:
            raise UsageError("--compile does not suit detectors, whose shapes change: leave it out")


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

Data = TrainAndVal[Coco]


def open_data(config: Config) -> Data:
    """Index the images by their annotations, without those that are excluded."""
    data = config.data or shapes_folder()
    indexes = train_and_val(data, config.annotations, config.val_data, config.val_annotations)
    return Data(*exclude(config.exclude, *indexes))


def build_model(config: Config, classes: int) -> "nn.Module":
    """Build the detector, with random weights."""
    from raydali.training.models.detection import build_detector

    return build_detector(config.model, classes)


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return the detector, which normalises 8-bit images itself."""
    from raydali.training.models.detection import DetectorNetwork

    return DetectorNetwork(model)


def train_pipeline(config: Config) -> TrainImages:
    """Make the pipeline of training images."""
    return TrainImages(
        seed=config.seed,
        image_size=config.image_size,
        crop_probability=config.crop_probability,
        random_area=config.random_area,
        flip_probability=config.flip_probability,
        **config.decoding,
    )


def val_pipeline(config: Config) -> ValidationImages:
    """Make the pipeline of validation images."""
    return ValidationImages(image_size=config.image_size, **config.decoding)


def evaluate(config: Config, network: "nn.Module", val: "ValidationPass") -> Mapping[str, Any]:
    """Return the figures of a network on batches of validation images."""
    from raydali.training.evaluation import detection

    return detection.evaluate(network, val.batches, val.source, val.worker, val.precision)


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver does not need these slow imports; without them it reports a mistyped option at once.
    import torch

    from raydali.launch.worker.training_run import TrainingRun
    from raydali.training.models.detection import constant_parts, detection_loss
    from raydali.training.optim import build_optimizer, learning_rate, set_learning_rate

    if config.data is None:  # each node draws its own copy
        data = data.relocate(shapes_folder())
    run = TrainingRun(config, session, samples=len(data.train))
    model = run.prepared(build_model(config, len(data.train.classes)))
    model = run.synchronized(model.to(memory_format=torch.channels_last))
    peak = config.peak(run.stream.global_batch_size)
    settings = config.optimizer_settings(partial(build_model, config), len(data.train.classes))
    optimizer = build_optimizer(model=model, learning_rate=peak, **settings)
    run.register_state(model=model, optimizer=optimizer)

    detector = network(model, config)
    differentiated = run.differentiated(model, detection_loss(detector), parts=constant_parts(model))
    with run.loaders(data, (train_pipeline(config), val_pipeline(config))) as (loader, _):
        for step in run.steps(loader):
            set_learning_rate(optimizer, learning_rate(step.progress, peak=peak, **config.rates))
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
    require_extra("detection", "pycocotools", "detectors")
    train_pipeline(config), val_pipeline(config)
    if config.model not in (SHAPES.model, Config.model):
        from raydali.training.models.detection import check_detector  # imports torchvision: seconds

        check_detector(config.model)


def describe(config: Config, data: Data) -> str:
    """Describe the data for the console."""
    images = f"{plural(len(data.train), 'training image')}, {plural(len(data.val), 'validation image')}"
    boxes = plural(len(data.train.boxes) + len(data.val.boxes), "box")
    return f"{images}, {boxes}, {plural(len(data.train.classes), 'class')}"


JOB = Job(
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
    about_demo="this is the demo, on drawn shapes; --data DIR trains on images in a folder like COCO's",
)

if __name__ == "__main__":
    run_job(JOB)
