"""The training loops without raydali: DDP on plain Ray Train, and torchft's on Ray Train's replica groups.

    python -m raydali.bench.goodput.ray_loop ray|torchft SETTINGS

A process of this module is the driver of a contender. Both loops find the samples of a step by its number, so that
neither has to restore a loader: plain Ray repeats none after a restart, torchft loses only those of ranks without part
in a step.
"""

import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray.train
import torch
from PIL import Image
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch.nn import functional as F
from torchvision.transforms import v2

from raydali.bench.goodput import recording
from raydali.train.models.small_images import digits_network

CLASSES, LEARNING_RATE, MOMENTUM = 10, 0.1, 0.9
LIGHTHOUSE = {"min_replicas": 1, "join_timeout_ms": 10_000}
"""By default it waits only 0.1 s for a rank that is slower than the others, and takes a step without it."""
TORCHFT_SECONDS = timedelta(seconds=60)
"""Timeouts of torchft, as in Ray's example; it notices a dead rank earlier, by its connections and heartbeats."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a run.

    Attributes:
        listed: a list with lines path,label: the samples of all steps.
        storage: the folder for checkpoints.
        batch_size: samples of a step and rank.
    """

    listed: str
    storage: str
    workers: int
    steps: int
    batch_size: int
    image_size: int
    checkpoint_every: int


class Batches:
    """The batches of this rank, by the number of the step from 0."""

    def __init__(self, settings: Settings) -> None:
        context = ray.train.get_context()
        self._rank, self._settings = context.get_world_rank(), settings
        self._samples = [line.rsplit(",", 1) for line in Path(settings.listed).read_text().splitlines()]
        self._order = np.random.default_rng(0).permutation(len(self._samples))
        size = [settings.image_size] * 2
        crop = v2.RandomResizedCrop(size, scale=(0.6, 1.0))
        self._transform = v2.Compose([v2.PILToTensor(), crop, v2.ToDtype(torch.float32, scale=True)])

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._settings.batch_size
        begin = (step * self._settings.workers + self._rank) * size
        chosen = [self._samples[id] for id in self._order[begin : begin + size]]
        images = [self._transform(Image.open(path).convert("RGB")) for path, _ in chosen]
        return torch.stack(images), torch.tensor([int(label) for _, label in chosen])


def train_ray(config: dict[str, Any]) -> None:
    """Train with DDP, from the newest checkpoint of Ray Train."""
    settings = Settings(**config)
    model = prepare_model(recording.model(CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)
    begin = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"))
        begin = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    batches, is_first = Batches(settings), ray.train.get_context().get_world_rank() == 0
    for step in range(begin, settings.steps):
        images, labels = batches[step]
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % settings.checkpoint_every == 0:
            with tempfile.TemporaryDirectory() as folder:
                state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if is_first:
                    torch.save(state, Path(folder, "state.pt"))
                ray.train.report({"step": step}, Checkpoint.from_directory(folder) if is_first else None)


def train_torchft(config: dict[str, Any]) -> None:
    """Train with torchft, each rank as a replica group: from another rank's state, and never from a checkpoint."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    settings, rank = Settings(**config), ray.train.get_context().get_world_rank()
    model = digits_network(CLASSES)
    sgd = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        sgd.load_state_dict(state["optimizer"])

    group = ProcessGroupGloo(timeout=TORCHFT_SECONDS / 2)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": sgd.state_dict()},
        world_size=1,
        rank=0,
        replica_id=f"rank_{rank}",
        timeout=TORCHFT_SECONDS,
        checkpoint_transport=PGTransport(group, timeout=TORCHFT_SECONDS / 2, device=torch.device("cpu")),
    )
    recording.record_steps(manager.num_participants)
    optimizer = Optimizer(manager, sgd)
    batches = Batches(settings)
    while (step := manager.current_step()) < settings.steps:
        images, labels = batches[step]
        optimizer.zero_grad()  # begins the quorum
        F.cross_entropy(model(images), labels).backward()
        # torchft 0.2.0's DistributedDataParallel ends a rank by an assertion if an all-reduce fails.
        for work in [manager.allreduce(each.grad) for each in model.parameters() if each.grad is not None]:
            work.wait()
        optimizer.step()
    manager.shutdown()


def main(name: str, settings: Settings) -> None:
    """Train with Ray Train's defaults, but any number of failures."""
    torch_config = None
    if name == "torchft":
        from ray.train.v2.torch.torchft_config import TorchftConfig

        torch_config = TorchftConfig(lighthouse_kwargs=LIGHTHOUSE, backend="gloo")
    TorchTrainer(
        train_torchft if name == "torchft" else train_ray,
        train_loop_config=asdict(settings),
        torch_config=torch_config,
        scaling_config=ScalingConfig(num_workers=settings.workers),
        run_config=RunConfig(storage_path=settings.storage, failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1], Settings(**json.loads(sys.argv[2])))
