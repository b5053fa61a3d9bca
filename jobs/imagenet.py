"""Train an image classifier on class folders, ImageNet's or your own:

    python jobs/imagenet.py                                          the built-in digits, on this machine
    python jobs/imagenet.py --data /data/imagenet --compile          train/ and val/ of class folders, or s3://, gs://
    ray job submit --working-dir . -- python jobs/imagenet.py ...    on a cluster

The loop below is all there is to it: copy this file and change it. The driver runs `main`, every worker `train`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from raydali.data.classification import TrainImages, ValidationImages
from raydali.data.digits import digits_folder
from raydali.data.image_folder import ImageFolder
from raydali.data.labeled_files import check_classes
from raydali.data.stream import OrderedPass
from raydali.launch.command import exit_with, parse
from raydali.launch.launcher import Job, launch
from raydali.launch.options import LaunchOptions, require
from raydali.report.console import Console

if TYPE_CHECKING:
    from raydali.launch.session import Session

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(LaunchOptions):
    """Train an image classifier with Ray Train and NVIDIA DALI, each sample exactly once."""

    data: str | None = None
    """Folder or URI (s3://, gs://) with train/ and val/ of class folders. Default: the built-in handwritten digits."""
    model: str = "resnet50"
    """A torchvision classification model by name, or `digits`, a small network."""
    image_size: int = 224
    """Side of the square images that the model gets, in pixels."""
    resize_size: int = 256
    """Validation: the shorter side is resized to this before the centre crop."""
    random_area: tuple[float, float] = (0.08, 1.0)
    """Training: smallest and largest share of an image's area that a crop takes."""
    flip_probability: float = 0.5
    """Training: how often an image is mirrored."""
    learning_rate: float | None = None
    """The highest learning rate, at the end of the warm-up. Default: 0.1 for each 256 images of the global batch."""
    warmup_epochs: float | None = None
    """Epochs over which the learning rate rises from zero. Default: 5, or a third of few epochs."""
    momentum: float = 0.9
    """Of SGD with Nesterov's momentum."""
    weight_decay: float = 5e-5
    """Of all parameters but norms' and biases'."""
    label_smoothing: float = 0.1
    """Share of the target that is spread over all classes."""
    mixup: float = 0.0
    """Alpha of mixup; 0: off."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0: off. With mixup too, each micro-batch gets one of the two."""
    ema_decay: float = 0.0
    """Decay of an exponential moving average of the weights, which is then what is validated; 0: off."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of the forward and backward pass; weights are kept in fp32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cuda_graph: bool = True
    """On GPUs, replay forward and backward as one CUDA graph, where a worker takes one micro-batch a step."""
    ceiling: bool = True
    """Measure at the start how fast a step is when its batch lies on the device already: seconds."""
    loader: Literal["dali", "torch", "synthetic"] = "dali"
    """dali; torch (torchvision's DataLoader, the baseline); synthetic (one resident batch, the ceiling)."""

    def __post_init__(self) -> None:
        """Refuse values out of their ranges; the sources, the stream and the pipelines check what is theirs."""
        super().__post_init__()
        require(self, "learning_rate", above=0)
        require(self, "warmup_epochs", least=0, below=self.epochs)
        require(self, "momentum", least=0, below=1)
        require(self, "weight_decay", least=0)
        require(self, "label_smoothing", least=0, below=1)
        require(self, "mixup", least=0)
        require(self, "cutmix", least=0)
        require(self, "ema_decay", least=0, below=1)


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
"""Defaults where no --data is given."""


@dataclass(frozen=True)
class Data:
    """The indexes, made by the driver and shared by the workers of a node."""

    train: ImageFolder
    val: ImageFolder


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver needs none of these, and answers a mistyped option seconds sooner without them.
    import gc
    import time
    from itertools import repeat

    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    from raydali.data.hashing import keyed
    from raydali.data.loader import Batch, make_loader
    from raydali.data.stream import MicroBatch
    from raydali.measure.meter import EpochMeter
    from raydali.measure.records import RankRecord, epoch_record
    from raydali.report.samples import SampleTrace, drop_samples
    from raydali.train.batchnorm import RunningStatistics
    from raydali.train.checkpoints import snapshot
    from raydali.train.evaluation import Validation, evaluate
    from raydali.train.mixing import mixing
    from raydali.train.models import build_model
    from raydali.train.optimisation import learning_rate, load_optimizer, parameter_groups
    from raydali.train.precision import Precision
    from raydali.train.rehearsal import rehearse
    from raydali.train.step import ForwardBackward

    worker, folder = session.worker, session.folder
    if config.data is None:  # each node writes the digits for itself
        root = digits_folder()
        data = Data(data.train.at(f"{root}/train"), data.val.at(f"{root}/val"))
    stream = config.stream(len(data.train))
    micro_batches = stream.micro_batches_of(worker.rank, worker.world_size)
    on_gpu = worker.device.type == "cuda"

    # -- Model and optimiser: the same on every rank, whatever their number

    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = True
    model = build_model(config.model, len(data.train.classes)).to(worker.device)
    model = model.to(memory_format=torch.channels_last)
    # Before SyncBatchNorm, whose process group cannot be copied; the average is only ever evaluated.
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(config.ema_decay)) if config.ema_decay else None
    if config.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model, worker.gradients)
    evaluated = ema.module if ema is not None else model
    statistics = RunningStatistics(model, micro_batches=micro_batches, all_micro_batches=stream.micro_batches_per_step)
    warmup = min(5, config.epochs / 3) if config.warmup_epochs is None else config.warmup_epochs
    peak = config.learning_rate or 0.1 * stream.global_batch_size / 256
    groups = parameter_groups(model, config.weight_decay)
    nesterov = config.momentum > 0
    optimizer = torch.optim.SGD(groups, lr=peak, momentum=config.momentum, nesterov=nesterov, fused=on_gpu)
    precision = Precision(config.precision, worker.device)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=config.label_smoothing)
    mix = mixing(config.mixup, config.cutmix, len(data.train.classes))

    # -- Resume: on any number of workers, to the sample

    start, segments, best, ceiling = 0, [], -1.0, None
    on = torch.cuda.get_device_name(worker.device) if on_gpu else "cpu"
    ceiling_of = [worker.world_size, on, config.precision, config.compile, config.cuda_graph]
    state = session.latest()
    if state is not None:
        start = stream.steps_of(state["stream"])
        model.load_state_dict(state["model"])
        load_optimizer(optimizer, state["optimizer"])
        if state["scaler"]:
            precision.scaler.load_state_dict(state["scaler"])
        if ema is not None and state["ema"] is not None:
            ema.load_state_dict(state["ema"])
        segments = [[RankRecord(**record) for record in segment] for segment in state["segments"]]
        best = state["best"]
        ceiling = state["ceiling"] if state.get("ceiling_of") == ceiling_of else None
    if worker.rank == 0:
        folder.keep_rows("epochs.jsonl", lambda row: row["step"] <= start)
        drop_samples(folder, start)
    worker.barrier()

    # -- Data

    augment, centre = make_pipelines(config)
    where = {
        "rank": worker.rank,
        "world_size": worker.world_size,
        "device": worker.device,
        "dtype": precision.dtype,
        "threads": worker.cpus,
    }
    loader = make_loader(config.loader, data.train, augment, stream, start=start, **where)
    in_order = OrderedPass(samples=len(data.val), batch_size=config.batch_size)
    val_loader = make_loader(config.loader, data.val, centre, in_order, **where)
    trace = SampleTrace(folder, worker.rank) if config.trace_samples else None

    # -- A step, as it is trained and as it is rehearsed

    total = stream.micro_batches_per_step
    graph = config.cuda_graph and on_gpu and total == worker.world_size and not config.sync_bn
    forward_backward = ForwardBackward(
        model, criterion, worker, precision, micro_batches=total, compiled=config.compile, graph=graph
    )

    def new_meter() -> EpochMeter:
        return EpochMeter(worker.device, rank=worker.rank, world_size=worker.world_size, node=worker.node)

    def train_step(batches: Iterator[Batch], meter: EpochMeter) -> list[MicroBatch]:
        """One step of the optimiser on this rank's next micro-batches."""
        consumed = []
        statistics.begin_step()
        for index in range(micro_batches):
            meter.enter("loader_wait")
            batch = next(batches)
            meter.first_batch()
            meter.enter("step")
            torch.manual_seed(int(keyed(config.seed, batch.micro_batch.number)) >> 1)
            images, labels = mix(batch["images"], batch["labels"])
            loss = forward_backward(images, labels, last=index == micro_batches - 1)
            statistics.after_micro_batch(index)
            meter.add(loss, len(images))
            consumed.append(batch.micro_batch)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if ema is not None:
            ema.update_parameters(model)
        meter.enter("loop")
        return consumed

    # -- Rehearsal: compile, capture and measure the ceiling while the loader is not yet at work

    if on_gpu or (config.ceiling and state is None):
        began = time.perf_counter()
        resident = repeat(Batch(loader.resident_batch(config.batch_size), stream.micro_batch(0, worker.rank)))
        practice = new_meter()
        measured = rehearse(
            lambda: train_step(resident, practice),
            [model, *([ema] if ema is not None else [])],
            optimizer,
            precision,
            worker,
            images=micro_batches * config.batch_size,
            measures_ceiling=config.ceiling and state is None,
        )
        ceiling = measured or ceiling
        if worker.rank == 0:
            seconds = round(time.perf_counter() - began, 3)
            session.tell("event", event="rehearsal", ceiling_images_per_second=measured, rehearsal_seconds=seconds)
        del resident, practice
    del state

    # -- Loop

    meter = new_meter()

    def checkpoint(step: int, *, best_weights: dict[str, Any] | None = None) -> None:
        meter.enter("checkpoint")
        statistics.average(worker)
        if trace is not None:
            trace.flush()
        partial = worker.gather(meter.record())
        parts = [*segments, partial] if any(record.images for record in partial) else segments
        state = None
        if worker.rank == 0:
            state = snapshot(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": precision.scaler.state_dict(),
                    "ema": ema.state_dict() if ema is not None else None,
                    "stream": loader.state_dict(),
                    "segments": [[asdict(record) for record in segment] for segment in parts],
                    "best": best,
                    "ceiling": ceiling,
                    "ceiling_of": ceiling_of,
                }
            )
        session.commit(step, state, best=best_weights)
        meter.enter("loop")

    def validate() -> Validation:
        meter.enter("validation")
        statistics.average(worker)
        if ema is not None:
            for averaged, current in zip(ema.module.buffers(), model.buffers(), strict=True):
                averaged.copy_(current)
        result = evaluate(evaluated, val_loader, worker, precision)
        meter.enter("loop")
        return result

    # Else a collection now and then walks all that imports and compilers left, and takes longer than a step.
    gc.collect()
    gc.freeze()
    meter.enter("loop")
    batches = iter(loader)
    for step in range(start, stream.steps):
        progress = (step + 0.5) * stream.global_batch_size / (config.epochs * stream.samples)
        rate = learning_rate(progress, peak=peak, warmup=warmup / config.epochs)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for micro_batch in train_step(batches, meter):
            if trace is not None:
                trace.add(micro_batch)
        done = step + 1
        consumed = stream.state(done)["samples_consumed"]
        epoch = stream.epoch_closed_by(step)
        if step == start:
            session.tell_start(step=start, steps=stream.steps)
        session.tell_progress(step=done, steps=stream.steps, epoch=stream.epoch_of(step), samples_consumed=consumed)
        if epoch is not None:
            validation = validate()
            segments.append(worker.gather(meter.record()))
            if worker.rank == 0:
                record = epoch_record(
                    segments,
                    epoch=epoch,
                    step=done,
                    samples_consumed=consumed,
                    learning_rate=rate,
                    validation=validation,
                    quarantined=0,
                    ceiling_images_per_second=ceiling,
                )
                folder.append("epochs.jsonl", record)
                session.tell("epoch", record=record)
            segments.clear()
            meter.reset()
            is_best, best = validation["top1"] > best, max(validation["top1"], best)
            weights = {"model": snapshot(evaluated.state_dict())} if is_best and worker.rank == 0 else None
            checkpoint(done, best_weights=weights)
        elif config.checkpoint_every and done % config.checkpoint_every == 0:
            checkpoint(done)
    loader.close()
    val_loader.close()


def make_pipelines(config: Config) -> tuple[TrainImages, ValidationImages]:
    """What happens to training and to validation images."""
    pixels: dict[str, Any] = {
        "image_size": config.image_size,
        "gpu_dtype": "float32" if config.precision == "fp32" else "float16",
    }
    train = TrainImages(
        seed=config.seed, random_area=config.random_area, flip_probability=config.flip_probability, **pixels
    )
    return train, ValidationImages(resize_size=config.resize_size, **pixels)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def main() -> None:
    """Parse, index, check, launch."""
    config = parse(Config, demo=DIGITS)
    console = Console()
    root = config.data.rstrip("/") if config.data else digits_folder()
    data = Data(ImageFolder.scan(f"{root}/train"), ImageFolder.scan(f"{root}/val"))
    check_classes(data.train, data.val)
    make_pipelines(config)
    if config.model not in (DIGITS.model, Config.model):
        from raydali.train.models import check_model  # imports torchvision: seconds

        check_model(config.model)
    if config.data is None:
        console.say("this is the demo, on handwritten digits; --data DIR trains on the images of DIR/train and DIR/val")
    console.say(
        f"{len(data.train)} training and {len(data.val)} validation images of {len(data.train.classes)} classes"
    )

    job = Job(
        name="imagenet",
        train=train,
        data=data,
        samples=len(data.train),
        fingerprint=data.train.fingerprint,
        unchangeable=("model",),
    )
    launch(job, config, console)


if __name__ == "__main__":
    exit_with(main)
