"""Train a video classifier on class folders, such as Kinetics, or on lists of files.

    python jobs/video.py                                          the built-in moving discs, on this machine
    python jobs/video.py --data /data/kinetics --stride 4         train/ and val/ of class folders, or s3://, gs://
    python jobs/video.py --data train.csv --val-data val.csv      lists: a line path,label for each video
    python jobs/video.py --data ... --model mvit_v2_s --image-size 224 --resize-size 256 --weights default

Each video is cut into clips, and each clip is a sample of the stream. Every worker runs the training loop in `train`.
The commands evaluate, predict and preview use the same functions for data, network, pipelines and evaluation. For your
own training, copy this file and change them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import raydali

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(raydali.WeightsOptions, raydali.ClassifierOptions, raydali.LabeledDataOptions):
    """Train a video classifier with Ray Train and NVIDIA DALI, each clip exactly once."""

    smaller_data = "videos stored nearer to --resize-size"
    usual_inputs = raydali.KINETICS
    usual_peaks: ClassVar = {**raydali.PEAKS, "sgd": 0.04, "adamw": 4e-4, "muon": 4e-4}

    batch_size: int = 8
    """Clips per micro-batch, which a device processes at once."""
    epochs: int = 45
    """Number of passes over the training clips."""
    model: str = "r2plus1d_18"
    """Name of a torchvision video model, such as r2plus1d_18 or mvit_v2_s, or `clips`, a small network."""
    sequence_length: int = 16
    """Frames per clip."""
    stride: int = 1
    """Distance between consecutive frames of a clip, in frames of the video; 1: every frame."""
    step: int | None = None
    """Distance between the starts of consecutive clips, in frames. Default: the span of a clip, so clips do not
    overlap."""
    skip_broken: bool = False
    """Leave out videos that cannot be read, with a warning. By default they are refused."""
    image_size: int = 112
    """Height and width of the model's frames, in pixels. Of --weights, only mean and deviation are taken over."""
    resize_size: int | None = None
    """Length of the shorter side before the crop, in pixels. Default: 8/7 of --image-size."""
    flip_probability: float = 0.5
    """Training: probability of a horizontal flip of a clip."""
    nesterov: bool = False
    """Nesterov's momentum; sgd and muon only."""
    decoders: int | None = None
    """Clips that each GPU decodes at once. Default: three per two video engines."""

    def __post_init__(self) -> None:
        """Check values; the stream and the pipelines check their own settings."""
        super().__post_init__()
        raydali.check_clips(self.sequence_length, self.stride, self.step)
        raydali.require(self, "decoders", least=1)


DISCS = Config(
    model="clips",
    sequence_length=8,
    stride=2,
    image_size=32,
    resize_size=36,
    flip_probability=0.0,  # a flip would swap the classes left and right
    epochs=5,
    batch_size=16,
    optimizer="adamw",
    learning_rate=0.01,
    label_smoothing=0.0,
    precision="fp32",
)
"""Defaults without --data."""

FINE_TUNING = Config(epochs=15, optimizer="adamw", learning_rate=1e-4, weight_decay=0.01)
"""Defaults with --weights."""


# ---------------------------------------------------------------------------------------------------------------------
# Data, network and evaluation, for training and for all commands

Data = raydali.TrainAndVal[raydali.VideoClips]


def open_data(config: Config) -> Data:
    """Cut the videos into clips, without those that are excluded."""
    folder = config.data or raydali.moving_discs_folder()
    videos = raydali.open_labeled(folder, scan=raydali.scan_videos, **config.reading)
    train, val = (
        raydali.VideoClips.index(
            files,
            sequence_length=config.sequence_length,
            stride=config.stride,
            step=config.step,
            skip_broken=config.skip_broken,
        )
        for files in raydali.exclude(config.exclude, *videos)
    )
    return Data(train, val)


def build_model(config: Config, classes: int) -> "nn.Module":
    """Build the model, with random weights."""
    return raydali.build_video_model(config.model, classes)


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return the model with its normalisation of 8-bit clips."""
    return raydali.Normalized(model, config.mean or raydali.KINETICS_MEAN, config.std or raydali.KINETICS_STD)


def train_pipeline(config: Config) -> raydali.TrainClips:
    """Make the pipeline of training clips."""
    return raydali.TrainClips(
        seed=config.seed,
        flip_probability=config.flip_probability,
        image_size=config.image_size,
        resize_size=config.resize_size,
    )


def val_pipeline(config: Config) -> raydali.ValidationClips:
    """Make the pipeline of validation clips."""
    return raydali.ValidationClips(image_size=config.image_size, resize_size=config.resize_size)


def loader(config: Config) -> "Callable[..., raydali.Loader]":
    """Return the function that makes loaders."""
    return partial(raydali.make_video_loader, decoders=config.decoders)


def evaluate(config: Config, network: "nn.Module", val: "raydali.ValidationPass") -> Mapping[str, Any]:
    """Return the figures of a network on batches of validation clips."""
    return raydali.evaluate_classifier(network, val.batches, val.worker, val.precision, inputs="clips")


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "raydali.Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver does not need this slow import; without it, a mistyped option is reported at once.
    import torch

    if config.data is None:  # each node writes its own copy
        data = data.relocate(raydali.moving_discs_folder())
    run = raydali.TrainingRun(config, session, samples=len(data.train), labels=data.train.one_each)
    device, classes = run.worker.device, len(data.train.classes)
    model = run.prepared(partial(build_model, config, classes)).to(memory_format=torch.channels_last_3d)
    model = run.synchronized(model)
    peak = config.peak(run.stream.global_batch_size)
    settings = config.optimizer_settings(partial(build_model, config), classes)
    optimizer = raydali.build_optimizer(model=model, learning_rate=peak, **settings)
    run.register_state(model=model, optimizer=optimizer)

    trained = network(model, config).to(device)
    criterion = raydali.classification_loss(data.train.one_each, classes, **config.weighting).to(device)
    differentiated = run.differentiated(model, lambda clips, labels: criterion(trained(clips), labels))
    evaluated = run.inference(trained, inputs="clips")
    pipelines = train_pipeline(config), val_pipeline(config)
    with run.loaders(data, pipelines, make=loader(config)) as (train_loader, _):
        for step in run.steps(train_loader):
            raydali.set_learning_rate(optimizer, raydali.learning_rate(step.progress, peak=peak, **config.rates))
            for batch in step:
                step.backward(differentiated, batch["clips"], batch["labels"])
            step.update(optimizer, max_norm=config.clip_grad)
            if step.ends_epoch:
                with run.validation() as val:
                    metrics = evaluate(config, evaluated, val)
                run.close_epoch(metrics, score="top1", weights=model)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def check(config: Config) -> None:
    """Refuse settings that do not fit together, before anything is started."""
    train_pipeline(config), val_pipeline(config)
    if config.model != DISCS.model:
        raydali.check_video_model(
            config.model, config.sequence_length, config.image_size
        )  # imports torchvision: seconds


def describe(config: Config, data: Data) -> str:
    """Describe the data for the console."""
    clips = f"{raydali.plural(len(data.train), 'training clip')}, {raydali.plural(len(data.val), 'validation clip')}"
    return f"{clips}, {config.describe(data.train.videos, data.val.videos, 'video')}"


JOB = raydali.Job(
    name="video",
    config=Config,
    open_data=open_data,
    build_model=build_model,
    network=network,
    train_pipeline=train_pipeline,
    val_pipeline=val_pipeline,
    loader=loader,
    evaluate=evaluate,
    train=train,
    task="video",
    check=check,
    unchangeable=lambda config: ("model", *config.changes_groups),
    describe=describe,
    demo=DISCS,
    about_demo="this is the demo, on moving discs; --data DIR trains on videos in a folder for each class",
    fine_tuning=FINE_TUNING,
)

if __name__ == "__main__":
    raydali.run_job(JOB)
