"""Train a detector on images with boxes, COCO or your own in its format:

    python jobs/detection.py                                     the built-in shapes, on this machine
    python jobs/detection.py --data /data/coco                   train2017/, val2017/ and annotations/, as COCO ships
    python jobs/detection.py --data /images --annotations train.json --val-data /others --val-annotations val.json
    python jobs/detection.py --data ... --model fasterrcnn_resnet50_fpn --image-size 640 --batch-size 4

Images are fitted into squares. The loop below is all there is to it: copy this file and change it. The driver runs
`main`, every worker `train`.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from raydali.data.sources.builtin.shapes import shapes_folder
from raydali.data.sources.coco import Coco
from raydali.data.sources.coco_folder import train_and_val
from raydali.data.sources.exclusion import exclude
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.boxes import PADDING
from raydali.data.tasks.detection import TrainImages, ValidationImages
from raydali.errors import UsageError
from raydali.extras import require_extra
from raydali.launch.driver.command import parse, run_main
from raydali.launch.driver.launcher import Job, launch
from raydali.launch.options import ImageOptions
from raydali.report.console import Console

if TYPE_CHECKING:
    from raydali.launch.worker.session import Session

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(ImageOptions):
    """Train a detector with Ray Train and NVIDIA DALI, each image exactly once."""

    smaller_data = "images stored nearer to --image-size"

    data: str | None = None
    """Folder or URI (s3://, gs://) as COCO ships: images in train/ and val/, or train2017/ and val2017/, and their
    annotations/instances_train.json and so on. Default: the built-in shapes."""
    annotations: str | None = None
    """JSON of the training images, with --val-data and --val-annotations; --data is then these images alone."""
    val_data: str | None = None
    """Validation images."""
    val_annotations: str | None = None
    """JSON of the validation images."""
    epochs: int = 26
    """Passes over the training images."""
    batch_size: int = 8
    """Images that a device holds at once: a micro-batch."""
    model: str = "fcos_resnet50_fpn"
    """A torchvision detector by name, such as retinanet_resnet50_fpn, fasterrcnn_resnet50_fpn or
    ssdlite320_mobilenet_v3_large; or `tiny`, a small network. Weights begin random."""
    image_size: int = 640
    """Side of the squares that images are fitted into, in pixels."""
    crop_probability: float = 0.5
    """Training: how often a random window is cut out of an image."""
    random_area: tuple[float, float] = (0.3, 1.0)
    """Training: smallest and largest share of an image's area that a window takes."""
    flip_probability: float = 0.5
    """Training: how often an image is mirrored."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """sgd, with momentum; or adamw."""
    learning_rate: float | None = None
    """The highest learning rate, at the end of the warm-up. Default: for each 16 images of the global batch 0.01, or
    0.0001 with adamw."""
    weight_decay: float = 1e-4
    """Of all parameters but norms' and biases'."""
    cuda_graph: bool = False
    """Not for detectors: their shapes depend on what they find."""
    compile: bool = False
    """Not for detectors either."""

    def __post_init__(self) -> None:
        """Refuse what cannot be; the sources, the stream and the pipelines check what is theirs."""
        super().__post_init__()
        for name in ("annotations", "val_data", "val_annotations"):
            value = getattr(self, name)
            if value is not None and self.data is None:
                raise UsageError(f"--{name.replace('_', '-')} {value} needs the training images too: give --data")
        for name in ("cuda_graph", "compile"):
            if getattr(self, name):
                raise UsageError(f"--{name.replace('_', '-')} is not for detectors, whose shapes change: leave it out")


SHAPES = Config(
    model="tiny",
    image_size=128,
    epochs=10,
    batch_size=8,
    optimizer="adamw",
    learning_rate=3e-3,
    precision="fp32",
)
"""Defaults where no --data is given."""


@dataclass(frozen=True)
class Data:
    """The indexes, made by the driver and shared by the workers of a node."""

    train: Coco
    val: Coco


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver needs none of these, and answers a mistyped option seconds sooner without them.
    import torch

    from raydali.data.loading.loader import Batch
    from raydali.data.loading.make import make_loader
    from raydali.data.stream.stream import MicroBatch
    from raydali.launch.worker.training_run import TrainingRun
    from raydali.measure.meter import EpochMeter
    from raydali.train.batchnorm import RunningStatistics
    from raydali.train.evaluation.detection import Detection, evaluate
    from raydali.train.models.detection import build_detector
    from raydali.train.optim import learning_rate, parameter_groups
    from raydali.train.precision import Precision

    if config.data is None:  # each node draws the shapes for itself
        root = shapes_folder()
        data = Data(data.train.relocate(f"{root}/train"), data.val.relocate(f"{root}/val"))
    run = TrainingRun(config, session, samples=len(data.train))
    worker, stream = run.worker, run.stream

    # -- Model and optimiser: the same on every rank, whatever their number

    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = True
    model = build_detector(config.model, len(data.train.classes)).to(worker.device)
    model = model.to(memory_format=torch.channels_last)
    if config.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, worker.gradients)
    statistics = RunningStatistics(
        model, micro_batches=run.micro_batches, all_micro_batches=stream.micro_batches_per_step
    )
    groups, fused = parameter_groups(model, config.weight_decay), worker.device.type == "cuda"
    optimizer: torch.optim.Optimizer
    if config.optimizer == "sgd":
        peak = config.learning_rate or 0.01 * stream.global_batch_size / 16
        optimizer = torch.optim.SGD(groups, lr=peak, momentum=0.9, fused=fused)
    else:
        peak = config.learning_rate or 1e-4 * stream.global_batch_size / 16
        optimizer = torch.optim.AdamW(groups, lr=peak, fused=fused)
    precision = Precision(config.precision, worker.device)

    # -- Checkpoints: a run resumes on any number of workers, to the image

    run.register_state(
        before_saving=lambda: statistics.average(worker),
        model=model,
        optimizer=optimizer,
        scaler=precision.scaler,
    )

    # -- Data

    augment, whole = make_pipelines(config, max_boxes=data.train.most_boxes)
    where = run.loader_settings()
    loader = make_loader(config.loader, data.train, augment, stream, start=run.start, **where)
    in_order = OrderedPass(samples=len(data.val), batch_size=config.batch_size)
    val_loader = make_loader(config.loader, data.val, whole, in_order, **where)

    # -- A step, as it is trained and as it is rehearsed

    parallel = worker.parallel(model)
    share = worker.world_size / stream.micro_batches_per_step

    def forward_backward(batch: Batch, *, last: bool) -> torch.Tensor:
        """The loss of a micro-batch: the sum of the detector's own. It leaves gradients that DDP's mean over ranks
        makes the mean over the global batch; ranks exchange them behind the last micro-batch of a step alone."""
        boxes, labels = batch["boxes"], batch["labels"]
        counts = (labels != PADDING).sum(1).tolist()
        targets = [{"boxes": boxes[i, :count], "labels": labels[i, :count]} for i, count in enumerate(counts)]
        with nullcontext() if last or parallel is None else parallel.no_sync():
            with precision.autocast():
                losses = (parallel or model)(batch["images"], targets)
                loss = torch.stack([*losses.values()]).sum()
            precision.scaler.scale(loss * share).backward()
        return loss.detach()

    def train_step(batches: Iterator[Batch], meter: EpochMeter) -> list[MicroBatch]:
        """One step of the optimiser on this rank's next micro-batches."""
        consumed = []
        statistics.begin_step()
        for index, batch in run.take_step(batches, meter):
            loss = forward_backward(batch, last=index == run.micro_batches - 1)
            statistics.after_micro_batch(index)
            meter.add(loss, len(batch.ids))
            consumed.append(batch.micro_batch)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        meter.enter("loop")
        return consumed

    def validate() -> Detection:
        run.meter.enter("validation")
        statistics.average(worker)
        result = evaluate(model, val_loader, data.val, worker, precision)
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
                run.close_epoch(validation, learning_rate=rate, score=validation["map"], weights=model)


def make_pipelines(config: Config, *, max_boxes: int) -> tuple[TrainImages, ValidationImages]:
    """What happens to training and to validation images."""
    train = TrainImages(
        seed=config.seed,
        image_size=config.image_size,
        max_boxes=max_boxes,
        crop_probability=config.crop_probability,
        random_area=config.random_area,
        flip_probability=config.flip_probability,
        **config.decoding,
    )
    return train, ValidationImages(image_size=config.image_size, **config.decoding)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def index(config: Config) -> Data:
    """Read the annotations."""
    data = config.data or shapes_folder()
    indexes = train_and_val(data, config.annotations, config.val_data, config.val_annotations)
    return Data(*exclude(config.exclude, *indexes))


def main() -> None:
    """Parse, index, check, launch."""
    config = parse(Config, demo=SHAPES)
    require_extra("detection", "pycocotools", "detectors")
    console = Console()
    make_pipelines(config, max_boxes=1)
    if config.model not in (SHAPES.model, Config.model):
        from raydali.train.models.detection import check_detector  # imports torchvision: seconds

        check_detector(config.model)
    data = index(config)
    if config.data is None:
        console.say("this is the demo, on drawn shapes; --data DIR trains on COCO, or what is laid out alike")
    console.say(
        f"{len(data.train)} training and {len(data.val)} validation images with {len(data.train.boxes)} and "
        f"{len(data.val.boxes)} boxes of {len(data.train.classes)} classes"
    )

    job = Job(
        name="detection",
        train=train,
        data=data,
        samples=len(data.train),
        fingerprint=data.train.fingerprint,
        unchangeable=("model", "optimizer"),
    )
    launch(job, config, console)


if __name__ == "__main__":
    run_main(main)
