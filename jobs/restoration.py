"""Train a network that restores images, deblurs them say, on pairs of an input and what it is to become:

    python jobs/restoration.py                              blurred photographs, on this machine
    python jobs/restoration.py --data /data/pairs           train/ and test/, in each img/ and gt/; or s3://, gs://
    python jobs/restoration.py --data /data/GOPRO --inputs blurry --targets sharp
    ray job submit --working-dir . -- python jobs/restoration.py ...        on a cluster

The two of a pair have the same path, img/scene/1.png and gt/scene/1.png, and get the same crop and flips. The run's
samples.png shows some of test/: input, output and truth.

The loop below is all there is to it: copy this file and change it. The driver runs `main`, every worker `train`.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raydali.data.sources.builtin.blurred import blurred_folder
from raydali.data.sources.exclusion import exclude
from raydali.data.sources.image_pairs import ImagePairs
from raydali.data.sources.validation_set import warn_of_overlap
from raydali.data.stream.stream import OrderedPass
from raydali.data.tasks.restoration import TrainPairs, ValidationPairs
from raydali.errors import UsageError
from raydali.launch.driver.command import parse, run_main
from raydali.launch.driver.launcher import Job, launch
from raydali.launch.options import ImageOptions, require
from raydali.report.console import Console

if TYPE_CHECKING:
    from raydali.launch.worker.session import Session

SSIM_WINDOW = 11
ROWS_SHOWN = 6

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(ImageOptions):
    """Train an image restoration network with Ray Train and NVIDIA DALI, each pair exactly once."""

    smaller_data = "pairs cut up into images nearer to --crop-size"

    data: str | None = None
    """Folder or URI (s3://, gs://) with train/ and test/, each with a folder of inputs and one of targets. Default:
    the built-in blurred photographs."""
    inputs: str = "img"
    """Folder of the images that the network gets, below train/ and test/."""
    targets: str = "gt"
    """Folder of the images that it is to give, each of its input's path, with any extension."""
    crop_size: int = 128
    """Training: side of the squares that are cropped at random, in pixels."""
    test_size: tuple[int, int] = (256, 256)
    """Validation: height and width of the centre that is cropped, in pixels."""
    flip_probability: float = 0.5
    """Training: how often a pair is mirrored from left to right, and how often upside down."""
    channels: int = 64
    """Of the network's features."""
    blocks: int = 4
    """Residual blocks of the network."""
    batch_size: int = 32
    """Pairs that a device holds at once: a micro-batch."""
    largest_image: tuple[int, int] = (1080, 1920)
    """On GPUs, height and width for which decoding buffers are set aside at the start."""
    learning_rate: float | None = None
    """The highest learning rate of AdamW, at the end of the warm-up. Default: 0.0005."""

    def __post_init__(self) -> None:
        """Refuse values out of their ranges; the sources, the stream and the pipelines check what is theirs."""
        super().__post_init__()
        require(self, "crop_size", least=1)
        require(self, "channels", least=1)
        require(self, "blocks", least=0)
        if min(self.test_size) < SSIM_WINDOW:
            raise UsageError(f"--test-size must be at least {SSIM_WINDOW} pixels, SSIM's window, not {self.test_size}")


BLURRED = Config(
    crop_size=48,
    test_size=(64, 64),
    channels=48,
    blocks=3,
    epochs=20,
    batch_size=4,
    learning_rate=0.001,
    precision="fp32",
)
"""Defaults where no --data is given."""


@dataclass(frozen=True)
class Data:
    """The indexes, made by the driver and shared by the workers of a node."""

    train: ImagePairs
    test: ImagePairs


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver needs none of these, and answers a mistyped option seconds sooner without them.
    import torch

    from raydali.data.loading.loader import Batch
    from raydali.data.loading.make import make_loader
    from raydali.data.stream.permutation import Permutation
    from raydali.data.stream.stream import MicroBatch
    from raydali.launch.worker.training_run import TrainingRun
    from raydali.measure.meter import EpochMeter
    from raydali.report.comparison_grid import draw
    from raydali.run.folder import SAMPLES
    from raydali.train.evaluation.restoration import Restoration, RestorationNetwork, charbonnier, evaluate, restore
    from raydali.train.models.normalized import Normalized
    from raydali.train.optim import learning_rate, parameter_groups
    from raydali.train.precision import Precision
    from raydali.train.step import ForwardBackward

    if config.data is None:  # each node writes the photographs for itself
        root = blurred_folder()
        data = Data(data.train.relocate(f"{root}/train"), data.test.relocate(f"{root}/test"))
    run = TrainingRun(config, session, samples=len(data.train))
    worker, stream = run.worker, run.stream

    # -- Model and optimiser: the same on every rank, whatever their number

    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = True
    model = RestorationNetwork(channels=config.channels, blocks=config.blocks).to(worker.device)
    model = model.to(memory_format=torch.channels_last)
    from_8_bits = Normalized(model, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)).to(worker.device)
    peak = config.learning_rate or 5e-4
    groups = parameter_groups(model, config.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=peak, fused=worker.device.type == "cuda")
    precision = Precision(config.precision, worker.device)

    # -- Checkpoints: a run resumes on any number of workers, to the sample

    run.register_state(
        model=model,
        optimizer=optimizer,
        scaler=precision.scaler,
    )

    # -- Data

    augment, centre = make_pipelines(config)
    where = run.loader_settings()
    loader = make_loader(config.loader, data.train, augment, stream, start=run.start, **where)
    in_order = OrderedPass(samples=len(data.test), batch_size=config.batch_size)
    test_loader = make_loader(config.loader, data.test, centre, in_order, **where)
    shown = Permutation(len(data.test), seed=0, epoch=0)(range(min(ROWS_SHOWN, len(data.test)))).tolist()

    # -- A step, as it is trained and as it is rehearsed

    forward_backward = ForwardBackward(
        from_8_bits,
        charbonnier,
        worker,
        precision,
        micro_batches=stream.micro_batches_per_step,
        compiled=config.compile,
        graph=run.can_capture,
    )

    def train_step(batches: Iterator[Batch], meter: EpochMeter) -> list[MicroBatch]:
        """One step of the optimiser on this rank's next micro-batches."""
        consumed = []
        for index, batch in run.take_step(batches, meter):
            loss = forward_backward(batch["inputs"], batch["targets"], last=index == run.micro_batches - 1)
            meter.add(loss, len(batch.ids))
            consumed.append(batch.micro_batch)
        precision.scaler.step(optimizer)
        precision.scaler.update()
        optimizer.zero_grad(set_to_none=True)
        meter.enter("loop")
        return consumed

    def draw_shown() -> None:
        """Write samples.png, of those that can be read."""
        readable = [id for id in shown if not test_loader.quarantine.examine([id])]
        if not readable:
            return
        inputs, targets = map(torch.stack, zip(*(centre.sample(data.test, id, 0) for id in readable), strict=True))
        outputs = restore(from_8_bits, inputs.to(worker.device), precision)
        try:
            session.folder.write(SAMPLES, draw(inputs, outputs, targets))
        except OSError as error:
            session.warn(f"{SAMPLES} could not be written: {error}")

    def validate() -> Restoration:
        run.meter.enter("validation")
        began = time.perf_counter()
        if worker.rank == 0:
            draw_shown()  # before `evaluate`, at whose end ranks wait for each other: validation's time on all of them
        result = evaluate(from_8_bits, test_loader, worker, precision)
        result["seconds"] = time.perf_counter() - began
        run.meter.enter("loop")
        return result

    # -- Loop

    with loader, test_loader:
        run.warm_up(loader, train_step, [model], optimizer, precision)
        batches = iter(loader)
        for step in run.steps():
            rate = learning_rate(step.progress, peak=peak, warmup=config.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate
            run.trained(train_step(batches, run.meter))
            if step.closes_epoch:
                validation = validate()
                run.close_epoch(validation, learning_rate=rate, score=validation["psnr"], weights=model)


def make_pipelines(config: Config) -> tuple[TrainPairs, ValidationPairs]:
    """What happens to training and to test pairs."""
    crop = config.crop_size, config.crop_size
    train = TrainPairs(crop_size=crop, seed=config.seed, flip_probability=config.flip_probability, **config.decoding)
    return train, ValidationPairs(crop_size=config.test_size, **config.decoding)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def main() -> None:
    """Parse, index, check, launch."""
    config = parse(Config, demo=BLURRED)
    console = Console()
    root = config.data.rstrip("/") if config.data else blurred_folder()
    pairs = [ImagePairs.scan(f"{root}/{split}", config.inputs, config.targets) for split in ("train", "test")]
    data = Data(*exclude(config.exclude, *pairs))
    warn_of_overlap(data.train, data.test)
    make_pipelines(config)
    if config.data is None:
        console.say(
            "this is the demo, on blurred photographs; --data DIR trains on the pairs of DIR/train and DIR/test"
        )
    console.say(f"{len(data.train)} training and {len(data.test)} test pairs")

    job = Job(
        name="restoration",
        train=train,
        data=data,
        samples=len(data.train),
        fingerprint=data.train.fingerprint,
        unchangeable=("channels", "blocks"),
    )
    launch(job, config, console)


if __name__ == "__main__":
    run_main(main)
