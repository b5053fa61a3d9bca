"""Weights by what `--weights` gives: `default`, a file, or the folder of a run."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from raydali.data.sources import storage
from raydali.data.sources.files import absolute
from raydali.errors import UsageError
from raydali.text import error_line
from raydali.train.models.factories import is_timm
from raydali.train.weights.preprocessing import Preprocessing, of_file, published_hash
from raydali.train.weights.published import timm_state, torchvision_file
from raydali.train.weights.state_file import State, read_state

DEFAULT = "default"
_BEST = "best/model.safetensors", "best/state.pt"
"""Where a run keeps its best weights; the second one is of earlier versions."""


@dataclass(frozen=True)
class Weights:
    """Weights as they were read, before they are matched with a model.

    Attributes:
        origin: where they are from, for messages.
        sha256: hash of the file, 64 hex digits; of names and tensors where the weights are timm's published ones.
        state: tensors by name, on the CPU.
        preprocessing: what they expect of images.
        classes: the classes of the run that trained them, in order; None if they are from elsewhere.
    """

    origin: str
    sha256: str
    state: State
    preprocessing: Preprocessing
    classes: tuple[str, ...] | None = None


def read_weights(given: str, model: str, image_size: int | None = None) -> Weights:
    """Read weights for a model, without running anything that a file contains.

    Args:
        given: `default`, which are torchvision's or timm's published weights; a .pt, .pth or .safetensors file; or the
            folder of a run, whose best weights are taken. Both may be s3:// and gs:// URIs.
        model: name of the model. Whether the weights are this model's is only checked by `match`.
        image_size: height and width of the images in pixels, to which timm adapts its published weights; None for their
            own.

    Raises:
        UsageError: they cannot be found, downloaded or read. The message is one line and says what to do.
    """
    if given == DEFAULT:
        return _default(model, image_size)
    path = absolute(given)
    return _of_run(path) if storage.is_folder(path) else _of_file(path, model)


def _default(model: str, image_size: int | None) -> Weights:
    if is_timm(model):
        state = timm_state(model, image_size)
        return Weights(f"timm's {model.partition(':')[2]}", _digest(state), state, of_file(model, ""))
    file = torchvision_file(model)
    weights = _of_file(str(file), model)
    if not weights.sha256.startswith(published_hash(file.name)):
        raise UsageError(f"{file} is not what torchvision published (SHA-256 {weights.sha256[:8]}): delete it")
    return weights


def _of_file(path: str, model: str) -> Weights:
    content = _read(path, f"--weights {path}")
    if content is None:
        raise UsageError(f"--weights {path} does not exist: give default, a .pt, .pth or .safetensors file, or a run")
    state, key = read_state(content, path)
    sha256 = hashlib.sha256(content).hexdigest()
    return Weights(f"{path}[{key}]" if key else path, sha256, state, of_file(model, sha256))


def _of_run(folder: str) -> Weights:
    if _read(f"{folder}/config.json", f"the run {folder}") is None:
        raise UsageError(f"--weights {folder} is a folder without config.json, so no run: give a run, or a file in it")
    for name in _BEST:
        content = _read(f"{folder}/{name}", f"the run {folder}")
        if content is not None:
            state, _ = read_state(content, f"{folder}/{name}")
            preprocessing, classes = _facts(folder)
            return Weights(f"{folder}/{name}", hashlib.sha256(content).hexdigest(), state, preprocessing, classes)
    raise UsageError(f"--weights {folder}: this run has no {_BEST[0]} yet, which is written after its first epoch")


def _facts(folder: str) -> tuple[Preprocessing, tuple[str, ...] | None]:
    """Return what the weights of a run expect, and its classes."""
    content = _read(f"{folder}/model.json", f"the run {folder}")
    if content is None:
        return Preprocessing(), None  # what is usual for the job, as in all runs of earlier versions
    try:
        facts: dict[str, Any] = dict(json.loads(content))
        return Preprocessing.from_json(facts), tuple(map(str, facts["classes"])) if "classes" in facts else None
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{folder}/model.json is broken ({error_line(repr(error))[:60]}): restore it, or give the file alone, "
            f"--weights {folder}/{_BEST[0]}"
        ) from error


def _read(path: str, whose: str) -> bytes | None:
    """Return the content of a file, None if there is none."""
    try:
        return storage.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot read {whose}: {error_line(error)[:80]}") from error


def _digest(state: State) -> str:
    made = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()
