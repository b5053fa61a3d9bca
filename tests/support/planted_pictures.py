"""Digits with a uniform picture and a mislabeled one, and a job of one's own whose loss is NaN for the former."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from jobs.imagenet import open_data
from raydali.data.builtin.digits import digits_folder
from raydali.inference.job_module import load_job
from raydali.run.checkpoints import read_checkpoint
from raydali.run.events import BadLoss
from raydali.run.find import name_of
from raydali.run.folder import RunFolder
from tests.support.copied_jobs import begun, opened
from tests.support.digits import SHORT, every_third
from tests.support.job_ranks import undisturbed
from tests.support.ranks import LocalSession, run_ranks

STANDARDISED = {
    "criterion(trained(images), labels)": "criterion(trained(standardised(images)), labels)",
    "def build_model(": """def standardised(images):
    import torch

    images = images.to(torch.get_default_dtype())
    mean, least, most = (of(images, (1, 2, 3), keepdim=True) for of in (torch.mean, torch.amin, torch.amax))
    return (images - mean) / (most - least) * 192 + 128


def build_model(""",
}
"""Changes of a copy of jobs/imagenet.py: a uniform picture is divided by zero, and its loss is NaN.

Minimum and maximum are exact in any order of computation. A compiled mean is not, so a deviation from it is not zero.
"""
PLANTED = {"uniform": "train/3/uniform.png", "mislabeled": "train/0/mislabeled.png"}
OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 16, "global_batch_size": 96, "trace_samples": True}
SIZES = {"image_size": SHORT.image_size, "resize_size": SHORT.resize_size}
"""Options of jobs that have both."""


def planted_digits(root: Path) -> Path:
    """Make class folders of 481 digits to train on; the mislabeled one is a one among the zeros."""
    every_third(digits_folder(), root)
    Image.new("RGB", (32, 32), (128, 128, 128)).save(root / PLANTED["uniform"])
    one = min((root / "train" / "1").iterdir())
    (root / PLANTED["mislabeled"]).write_bytes(one.read_bytes())
    return root


def id_of(source: Any, planted: str) -> int:
    """The id of a planted picture."""
    return next(id for id in range(len(source)) if source.path(id).endswith(PLANTED[planted]))


def steps_of(root: Path, planted: str, **options: Any) -> list[int]:
    """The steps that have a planted picture."""
    config = replace(SHORT, data=str(root), **options)
    source = open_data(config).train
    stream, id = config.stream(len(source)), id_of(source, planted)
    return [batch.step for batch in stream.micro_batches(0, 1) if id in batch.ids]


def planted_run(
    file: Path,
    root: Path,
    storage: Path,
    *,
    workers: int = 1,
    stop_at: int | None = None,
    device: str = "cpu",
    **options: Any,
) -> list[tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Train the job in a file on the planted digits; return the events of bad losses, and the weights, of each rank.

    The run is `storage`/run; a second call resumes it.
    """
    sizes = SIZES if hasattr(load_job(file).config, "resize_size") else {}
    options = {**OPTIONS, **sizes, "data": str(root), **options}
    run = RunFolder(str(storage), "run")
    if not run.exists("config.json"):
        begun(*opened(file, **options), storage)
    return run_ranks(workers, partial(_train, stop_at=stop_at, device=device, **options), file, run)


def _train(file: Path, run: RunFolder, *, stop_at: int | None, device: str, **options: Any) -> tuple[Any, Any]:
    job, config, data = opened(file, **options)
    session = LocalSession(run, stop_at=stop_at, device=torch.device(device))
    try:
        with undisturbed():
            job.train(config, data, session)
        session.checkpoints.finish()
    finally:
        for row in session.rows if session.worker.rank == 0 else ():  # as the driver
            run.append("events.jsonl", row)
    state = session.checkpoints.newest()
    assert state is not None
    rows = [message.row() for message in session.messages if isinstance(message, BadLoss)]
    return rows, {name: tensor.numpy() for name, tensor in state["state"]["model"].items()}


def state_after(folder: RunFolder, step: int) -> dict[str, Any]:
    """The parts of the state in the checkpoint after this number of steps."""
    state: dict[str, Any] = read_checkpoint(folder, name_of(step))["state"]
    return state
