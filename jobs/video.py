"""Train a classifier of videos on class folders of them, Kinetics' or your own, or on lists of files:

    python jobs/video.py                                          the built-in moving discs, on this machine
    python jobs/video.py --data /data/kinetics --stride 4         train/ and val/ of class folders, or s3://, gs://
    python jobs/video.py --data train.csv --val-data val.csv      lists: a line path,label for each video
    python jobs/video.py --data ... --model mvit_v2_s --image-size 224 --resize-size 256 --optimizer adamw

Each video is cut into clips, and each clip is a sample of the stream. The loop below is all there is to it: copy this
file and change it. The driver runs `main`, every worker `train`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raydali.data.sources.builtin.moving_discs import moving_discs_folder
from raydali.data.sources.exclusion import exclude
from raydali.data.sources.formats import train_and_val
from raydali.data.sources.video.clips import VideoClips, check_clips, scan_videos
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.video import TrainClips, ValidationClips
from raydali.errors import UsageError
from raydali.launch.driver.command import parse, run_main
from raydali.launch.driver.launcher import Job, launch
from raydali.launch.options import TrainingOptions, require
from raydali.report.console import Console

if TYPE_CHECKING:
    from raydali.launch.worker.session import Session

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(TrainingOptions):
    """Train a video classifier with Ray Train and NVIDIA DALI, each clip exactly once."""

    smaller_data = "videos stored nearer to --resize-size"

    data: str | None = None
    """Folder or URI (s3://, gs://) with train/ and val/ of class folders. Default: the built-in moving discs."""
    val_data: str | None = None
    """Validation videos; --data is then the training videos alone. Each is a folder of class folders, or a list: a text
    or CSV file with a line path,label for each video."""
    root: str | None = None
    """Folder or URI that relative paths in lists begin at. Default: the folder of each list."""
    batch_size: int = 8
    """Clips that a device holds at once: a micro-batch."""
    epochs: int = 45
    """Passes over the training clips."""
    model: str = "r2plus1d_18"
    """A torchvision video model by name, such as r2plus1d_18 or mvit_v2_s; or `clips`, a small network."""
    sequence_length: int = 16
    """Frames of a clip."""
    stride: int = 1
    """From one frame of a clip to its next."""
    step: int | None = None
    """From the first frame of a clip to that of the video's next. Default: as many as a clip spans."""
    skip_broken: bool = False
    """Leave out the videos that cannot be read, and say how many, instead of refusing them."""
    image_size: int = 112
    """Side of the square frames that the model gets, in pixels."""
    resize_size: int | None = None
    """The shorter side is resized to this before the crop. Default: 8/7 of --image-size, as 128 is of 112."""
    flip_probability: float = 0.5
    """Training: how often a clip is mirrored."""
    decoders: int | None = None
    """Clips that each GPU decodes at once. Default: three for two of its video engines."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd, with momentum; adamw, for transformers such as MViT and Swin."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""

    def __post_init__(self) -> None:
        """Refuse values out of their ranges; the stream and the pipelines check what is theirs."""
        super().__post_init__()
        for name, value in (("--val-data", self.val_data), ("--root", self.root)):
            if value is not None and self.data is None:
                raise UsageError(f"{name} {value} needs the training videos too: give --data")
        check_clips(self.sequence_length, self.stride, self.step)
        require(self, "decoders", least=1)
        require(self, "label_smoothing", least=0, below=1)


DISCS = Config(
    model="clips",
    sequence_length=8,
    stride=2,
    image_size=32,
    resize_size=36,
    flip_probability=0.0,  # mirrored, left would be right
    epochs=5,
    batch_size=16,
    optimizer="adamw",
    learning_rate=0.01,
    label_smoothing=0.0,
    precision="fp32",
)
"""Defaults where no --data is given."""


@dataclass(frozen=True)
class Data:
    """The indexes, made by the driver and shared by the workers of a node."""

    train: VideoClips
    val: VideoClips


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver needs none of these, and answers a mistyped option seconds sooner without them.
    import torch

    from raydali.data.loading.loader import Batch
    from raydali.data.loading.video_loader import make_video_loader
    from raydali.data.stream.stream import MicroBatch
    from raydali.launch.worker.training_run import TrainingRun
    from raydali.measure.meter import EpochMeter
    from raydali.train.batchnorm import RunningStatistics
    from raydali.train.evaluation.classification import Validation, evaluate
    from raydali.train.models.normalized import Normalized
    from raydali.train.models.video import KINETICS_MEAN, KINETICS_STD, build_video_model
    from raydali.train.optim import learning_rate, parameter_groups
    from raydali.train.precision import Precision
    from raydali.train.step import ForwardBackward

    if config.data is None:  # each node writes the discs for itself
        root = moving_discs_folder()
        data = Data(data.train.relocate(f"{root}/train"), data.val.relocate(f"{root}/val"))
    labels = data.train.labels(np.arange(len(data.train)))
    run = TrainingRun(config, session, samples=len(data.train), labels=labels)
    worker, stream = run.worker, run.stream

    # -- Model and optimiser: the same on every rank, whatever their number

    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = True
    model = build_video_model(config.model, len(data.train.videos.classes)).to(worker.device)
    model = model.to(memory_format=torch.channels_last_3d)
    if config.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, worker.gradients)
    normalized = Normalized(model, KINETICS_MEAN, KINETICS_STD).to(worker.device)
    statistics = RunningStatistics(
        model, micro_batches=run.micro_batches, all_micro_batches=stream.micro_batches_per_step
    )
    groups, fused = parameter_groups(model, config.weight_decay), worker.device.type == "cuda"
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        peak = config.learning_rate or 0.01 * stream.global_batch_size / 64
        optimizer = torch.optim.SGD(groups, lr=peak, momentum=0.9, fused=fused)
    else:
        peak = config.learning_rate or 1e-4 * stream.global_batch_size / 64
        optimizer = torch.optim.AdamW(groups, lr=peak, fused=fused)
    precision = Precision(config.precision, worker.device)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)

    # -- Checkpoints: a run resumes on any number of workers, to the clip

    run.register_state(
        before_saving=lambda: statistics.average(worker),
        model=model,
        optimizer=optimizer,
        scaler=precision.scaler,
    )

    # -- Data

    augment, centre = make_pipelines(config)
    where = run.loader_settings() | {"decoders": config.decoders}
    loader = make_video_loader(config.loader, data.train, augment, stream, start=run.start, **where)
    in_order = OrderedPass(samples=len(data.val), batch_size=config.batch_size)
    val_loader = make_video_loader(config.loader, data.val, centre, in_order, **where)

    # -- A step, as it is trained and as it is rehearsed

    forward_backward = ForwardBackward(
        normalized,
        criterion,
        worker,
        precision,
        micro_batches=stream.micro_batches_per_step,
        compiled=config.compile,
        graph=run.can_capture,
    )

    def train_step(batches: Iterator[Batch], meter: EpochMeter) -> list[MicroBatch]:
        """One step of the optimiser on this rank's next micro-batches."""
        consumed = []
        statistics.begin_step()
        for index, batch in run.take_step(batches, meter):
            loss = forward_backward(batch["clips"], batch["labels"], last=index == run.micro_batches - 1)
            statistics.after_micro_batch(index)
            meter.add(loss, len(batch.ids))
            consumed.append(batch.micro_batch)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        meter.enter("loop")
        return consumed

    def validate() -> Validation:
        run.meter.enter("validation")
        statistics.average(worker)
        result = evaluate(normalized, val_loader, worker, precision, inputs="clips")
        run.meter.enter("loop")
        return result

    # -- Loop

    with loader, val_loader:
        run.warm_up(loader, train_step, [model], optimizer, precision)
        batches = iter(loader)
        for step in run.steps():
            rate = learning_rate(step.progress, peak=peak, warmup=config.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate
            run.trained(train_step(batches, run.meter))
            if step.closes_epoch:
                validation = validate()
                run.close_epoch(validation, learning_rate=rate, score=validation["top1"], weights=model)


def make_pipelines(config: Config) -> tuple[TrainClips, ValidationClips]:
    """What happens to training and to validation clips."""
    frames: dict[str, Any] = {"image_size": config.image_size, "resize_size": config.resize_size}
    train = TrainClips(seed=config.seed, flip_probability=config.flip_probability, **frames)
    return train, ValidationClips(**frames)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def index(config: Config) -> Data:
    """Cut the videos into clips."""
    videos = train_and_val(config.data or moving_discs_folder(), config.val_data, config.root, scan_videos)
    train, val = (
        VideoClips.index(
            files,
            sequence_length=config.sequence_length,
            stride=config.stride,
            step=config.step,
            skip_broken=config.skip_broken,
        )
        for files in exclude(config.exclude, *videos)
    )
    return Data(train, val)


def main() -> None:
    """Parse, index, check, launch."""
    config = parse(Config, demo=DISCS)
    console = Console()
    make_pipelines(config)
    if config.model != DISCS.model:
        from raydali.train.models.video import check_video_model  # imports torchvision: seconds

        check_video_model(config.model, config.sequence_length, config.image_size)
    data = index(config)
    if config.data is None:
        console.say("this is the demo, on moving discs; --data DIR trains on the videos of DIR/train and DIR/val")
    console.say(
        f"{len(data.train)} training and {len(data.val)} validation clips of {len(data.train.videos)} and "
        f"{len(data.val.videos)} videos of {len(data.train.videos.classes)} classes"
    )

    job = Job(
        name="video",
        train=train,
        data=data,
        samples=len(data.train),
        fingerprint=data.train.fingerprint,
        labels=data.train.labels(np.arange(len(data.train))),
        unchangeable=("model", "optimizer"),
    )
    launch(job, config, console)


if __name__ == "__main__":
    run_main(main)
