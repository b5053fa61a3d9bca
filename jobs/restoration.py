"""Train a network that restores images, for example removes blur, on pairs of an input and its target.

    python jobs/restoration.py                              blurred photographs, on this machine
    python jobs/restoration.py --data /data/pairs           train/ and test/ with img/ and gt/; or s3://, gs://
    python jobs/restoration.py --data /data/GOPRO --inputs blurry --targets sharp
    ray job submit --working-dir . -- python jobs/restoration.py ...        on a cluster

An input and its target have the same relative path, such as img/scene/1.png and gt/scene/1.png, and get the same crop
and flips. The run's samples.png shows input, output and target of some test images.

Every worker runs the training loop in `train`. The commands evaluate, predict, export and preview use the same
functions for data, network, pipelines and evaluation. For your own training, copy this file and change them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import raydali

if TYPE_CHECKING:
    import torch
    from torch import nn

SSIM_WINDOW = 11

# ---------------------------------------------------------------------------------------------------------------------
# Settings


@dataclass(frozen=True, kw_only=True)
class Config(raydali.StartingWeightsOptions, raydali.ScheduleOptions, raydali.ImageOptions, raydali.SplitOptions):
    """Train an image restoration network with Ray Train and NVIDIA DALI, each pair exactly once."""

    smaller_data = "pairs cut up into images nearer to --crop-size"

    data: str | None = None
    """Folder or URI (s3://, gs://) with train/ and test/, each with a folder of inputs and one of targets; or with
    these two itself. Default: the built-in blurred photographs."""
    inputs: str = "img"
    """Folder of the input images, within train/ and test/."""
    targets: str = "gt"
    """Folder of the target images, within train/ and test/. A target has the path of its input, with any extension."""
    crop_size: int = 128
    """Training: height and width of the random crops, in pixels."""
    test_size: tuple[int, int] = (256, 256)
    """Validation: height and width of the centre crop, in pixels."""
    flip_probability: float = 0.5
    """Training: probability of a horizontal flip, and of a vertical flip."""
    channels: int = 64
    """Channels of the network's feature maps."""
    blocks: int = 4
    """Number of residual blocks of the network."""
    batch_size: int = 32
    """Pairs per micro-batch, which a device processes at once."""
    largest_image: tuple[int, int] = (1080, 1920)
    """On GPUs, height and width in pixels for which decoding buffers are allocated at the start."""
    learning_rate: float | None = None
    """Peak learning rate of AdamW, at the end of the warm-up. Default: 0.0005."""

    def __post_init__(self) -> None:
        """Check values; the sources, the stream and the pipelines check their own settings."""
        super().__post_init__()
        raydali.require(self, "crop_size", least=1)
        raydali.require(self, "channels", least=1)
        raydali.require(self, "blocks", least=0)
        if min(self.test_size) < SSIM_WINDOW:
            raise raydali.UsageError(
                f"--test-size must be at least {SSIM_WINDOW}, the pixels of SSIM's window, not {self.test_size}"
            )


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
"""Defaults without --data."""


# ---------------------------------------------------------------------------------------------------------------------
# Data, network and evaluation, for training and for all commands

Data = raydali.TrainAndVal[raydali.ImagePairs]


def open_data(config: Config) -> Data:
    """Index the pairs in train/ and test/, without those that are excluded."""
    root = config.data or raydali.blurred_folder()
    pairs = raydali.open_pairs(root, ("train", "test"), config.inputs, config.targets, **config.splitting)
    return Data(*raydali.exclude(config.exclude, *pairs))


def build_model(config: Config, _classes: int = 0) -> "nn.Module":
    """Build the network, with random weights except in its last layer, which is zero."""
    return raydali.RestorationNetwork(channels=config.channels, blocks=config.blocks)


def network(model: "nn.Module", config: Config) -> "nn.Module":
    """Return the model for 8-bit images, which it takes in 0..1."""
    return raydali.Normalized(model, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))


def train_pipeline(config: Config) -> raydali.TrainPairs:
    """Make the pipeline of training pairs."""
    crop = config.crop_size, config.crop_size
    return raydali.TrainPairs(
        crop_size=crop, seed=config.seed, flip_probability=config.flip_probability, **config.decoding
    )


def val_pipeline(config: Config) -> raydali.ValidationPairs:
    """Make the pipeline of test pairs."""
    return raydali.ValidationPairs(crop_size=config.test_size, **config.decoding)


def evaluate(config: Config, network: "nn.Module", val: "raydali.ValidationPass") -> Mapping[str, Any]:
    """Return the figures of a network on batches of test pairs."""
    return raydali.evaluate_restoration(network, val.batches, val.worker, val.precision)


def predictions(config: Config, outputs: "torch.Tensor", paths: Sequence[str]) -> Mapping[str, bytes]:
    """Return the restored images as PNG files, for `raydali predict`."""
    return raydali.restored_files(config, outputs, paths)


# ---------------------------------------------------------------------------------------------------------------------
# In every worker


def train(config: Config, data: Data, session: "raydali.Session") -> None:
    """Train from the newest checkpoint, or from the start, to the end of the stream."""
    # The driver does not need this slow import; without it, a mistyped option is reported at once.
    import torch

    if config.data is None:  # each node writes its own copy
        data = data.relocate(raydali.blurred_folder(), val="test")
    run = raydali.TrainingRun(config, session, samples=len(data.train))
    device = run.worker.device
    model = run.synchronized(run.prepared(partial(build_model, config)).to(memory_format=torch.channels_last))
    peak = config.learning_rate or 5e-4
    optimizer = raydali.build_optimizer("adamw", model, learning_rate=peak, weight_decay=config.weight_decay)
    run.register_state(model=model, optimizer=optimizer)

    trained = network(model, config).to(device)
    differentiated = run.differentiated(model, lambda inputs, targets: raydali.charbonnier(trained(inputs), targets))
    evaluated = run.inference(trained, inputs="inputs")
    with run.loaders(data, (train_pipeline(config), val_pipeline(config))) as (loader, val_loader):
        examples = raydali.Examples(session.folder, val_loader)
        for step in run.steps(loader):
            raydali.set_learning_rate(optimizer, raydali.learning_rate(step.progress, peak=peak, **config.rates))
            for batch in step:
                step.backward(differentiated, batch["inputs"], batch["targets"])
            step.update(optimizer, max_norm=config.clip_grad)
            if step.ends_epoch:
                with run.validation() as val:
                    if run.worker.rank == 0:
                        examples.draw(lambda inputs: raydali.restore(trained, inputs.to(device), run.precision))
                    metrics = evaluate(config, evaluated, val)
                run.close_epoch(metrics, score="psnr", weights=model)


# ---------------------------------------------------------------------------------------------------------------------
# In the driver


def check(config: Config) -> None:
    """Refuse settings that do not fit together, before anything is started."""
    train_pipeline(config), val_pipeline(config)


JOB = raydali.Job(
    name="restoration",
    config=Config,
    open_data=open_data,
    build_model=build_model,
    network=network,
    train_pipeline=train_pipeline,
    val_pipeline=val_pipeline,
    evaluate=evaluate,
    train=train,
    task="restoration",
    predictions=predictions,
    check=check,
    unchangeable=lambda _: ("channels", "blocks", "freeze"),
    describe=lambda _, data: (
        f"{raydali.plural(len(data.train), 'training pair')}, {raydali.plural(len(data.val), 'test pair')}"
    ),
    demo=BLURRED,
    about_demo="this is the demo, on blurred photographs; --data DIR trains on pairs in DIR/train and DIR/test",
)

if __name__ == "__main__":
    raydali.run_job(JOB)
