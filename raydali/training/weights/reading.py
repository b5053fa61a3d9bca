"""Reads the weights that `--weights` names: `default`, a file, or a run's folder. Nothing in a file is executed."""

import argparse
import hashlib
import http.client
import io
import json
import re
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raydali.data.index.files import absolute
from raydali.data.read import storage
from raydali.errors import UsageError
from raydali.text import error_line, summarize
from raydali.training.models.factories import build_timm, is_timm, timm_settings
from raydali.training.weights.preprocessing import Preprocessing, of_file, published_by_torchvision, published_hash

State = dict[str, torch.Tensor]
DEFAULT = "default"
_BEST = "best/model.safetensors"
_INDEX = f"{_BEST}.index.json"
"""A run keeps its best weights in this file, or in parts with this index."""
_KEYS = "state_dict_ema", "model_ema", "ema", "state_dict", "model", "state"
"""Training programs keep the weights under these keys. Averaged weights, which they validate, come first."""
_SECONDS = 20
"""Limit of the wait for a server's next bytes."""


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


def read_weights(origin: str, model: str, image_size: int | None = None) -> Weights:
    """Read weights for a model, without running anything that a file contains.

    Args:
        origin: `default`, which are torchvision's or timm's published weights; a .pt, .pth or .safetensors file; or the
            folder of a run, whose best weights are taken. Both may be s3:// and gs:// URIs.
        model: name of the model. Whether the weights are this model's is only checked by `match`.
        image_size: height and width of the images in pixels, to which timm adapts its published weights; None for their
            own.

    Raises:
        UsageError: they cannot be found, downloaded or read. The message is one line and says what to do.
    """
    if origin == DEFAULT:
        return _default(model, image_size)
    path = absolute(origin)
    return _of_run(path) if storage.is_folder(path) else _of_file(path, model)


def _default(model: str, image_size: int | None) -> Weights:
    if is_timm(model):
        state = _timm_state(model, image_size)
        return Weights(f"timm's {model.partition(':')[2]}", _digest(state), state, of_file(model, ""))
    file = _torchvision_file(model)
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
    best = read_best(lambda file: _read(f"{folder}/{file}", f"the run {folder}"), folder)
    if best is None:
        raise UsageError(f"--weights {folder}: this run has no {_BEST} yet, which is written after its first epoch")
    file, sha256, state = best
    return Weights(f"{folder}/{file}", sha256, state, *_facts(folder))


def read_best(read: Callable[[str], bytes | None], folder: str) -> tuple[str, str, State] | None:
    """Return the file of a run's best weights, its SHA-256, and the weights; None if there are none yet.

    Large weights are in parts, and the file is their index.

    Args:
        read: returns the content of a file of the run; None if it does not exist.
        folder: the run's, for messages.

    Raises:
        UsageError: a file is broken, or a part is missing or another one.
    """
    if (content := read(_BEST)) is not None:
        state, _ = read_state(content, f"{folder}/{_BEST}")
        return _BEST, hashlib.sha256(content).hexdigest(), state
    if (index := read(_INDEX)) is None:
        return None
    state = {}
    for file, sha256 in json.loads(index)["metadata"]["sha256"].items():
        part = read(f"best/{file}")
        if part is None or hashlib.sha256(part).hexdigest() != sha256:
            raise UsageError(f"--weights {folder}/best/{file} is missing, or not the one in the index: copy it again")
        state |= _safetensors(part, f"{folder}/best/{file}")
    return _INDEX, hashlib.sha256(index).hexdigest(), state


def _facts(folder: str) -> tuple[Preprocessing, tuple[str, ...] | None]:
    """Return what the weights of a run expect, and its classes."""
    content = _read(f"{folder}/model.json", f"the run {folder}")
    if content is None:
        return Preprocessing(), None  # what is usual for the job
    try:
        facts: dict[str, Any] = dict(json.loads(content))
        return Preprocessing.from_json(facts), tuple(map(str, facts["classes"])) if "classes" in facts else None
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{folder}/model.json is broken ({error_line(repr(error))[:60]}): restore it, or give the file alone, "
            f"--weights {folder}/{_BEST}"
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


# ---------------------------------------------------------------------------------------------------------------------
# Published weights, from the caches of torchvision and timm, or from the network


def _torchvision_file(model: str) -> Path:
    """Return the file of torchvision's default weights, from the cache of torch.hub; it is downloaded if necessary.

    Raises:
        UsageError: the model has none; the file cannot be downloaded.
    """
    if not published_by_torchvision(model):
        whose = f"--model {model}" if model else "this job"
        raise UsageError(f"--weights default: no weights are published for {whose}: give a FILE or a RUN")
    import torchvision

    url = torchvision.models.get_model_weights(model).DEFAULT.url
    file = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if file.exists():
        return file
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _short_waits():
            torch.hub.download_url_to_file(url, str(file), published_hash(url), progress=sys.stderr.isatty())
    except (OSError, RuntimeError, http.client.HTTPException) as error:  # RuntimeError: its hash is another
        raise UsageError(
            f"cannot download {url} ({error_line(error)[:60]}): put it into {file.parent}, or give --weights FILE"
        ) from error
    return file


def _timm_state(model: str, image_size: int | None) -> dict[str, torch.Tensor]:
    """Return timm's weights for a model, which timm itself adapts to the image size.

    Raises:
        UsageError: the model has none; they cannot be downloaded.
    """
    settings = timm_settings(model)
    if not settings.has_weights:
        raise UsageError(f"--weights default: timm has no weights for --model {model}: give a FILE or a RUN")
    place = f"https://huggingface.co/{settings.hf_hub_id}" if settings.hf_hub_id else settings.url
    try:
        with _short_waits(), _one_attempt():
            built = build_timm(model, settings.num_classes, image_size, pretrained=True)
    except Exception as error:  # clients of hubs raise errors of their own
        raise UsageError(
            f"cannot download {place} ({type(error).__name__}): "
            f"download its model.safetensors elsewhere, and give --weights FILE"
        ) from error
    return dict(built.state_dict())


@contextmanager
def _short_waits() -> Iterator[None]:
    """Limit how long connections wait; torch.hub sets no limit."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_SECONDS)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


@contextmanager
def _one_attempt() -> Iterator[None]:
    """Let Hugging Face's client use its cache alone if the hub does not answer once: it would try for a minute."""
    import huggingface_hub

    constants: Any = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    try:
        huggingface_hub.get_session().head(constants.ENDPOINT, timeout=_SECONDS / 2)
    except Exception:  # of httpx or requests, which depends on the version
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


# ---------------------------------------------------------------------------------------------------------------------
# The tensors in a file: .safetensors, or what `torch.save` wrote


def read_state(content: bytes, where: str) -> tuple[State, str]:
    """Return the state dict in a file, and the key under which a checkpoint holds it ("" if it is the file itself).

    Args:
        content: the file's bytes.
        where: the file, for messages.

    Raises:
        UsageError: it is empty, truncated, or no state dict; it would run code.
    """
    if not content:
        raise UsageError(f"--weights {where} is empty: copy it again")
    if pointer := storage.why_pointer(content):
        raise UsageError(f"--weights {where}: {pointer}")
    if where.endswith(".safetensors"):
        return _safetensors(content, where), ""
    return _state_in(_unpickled(content, where), where)


def _safetensors(content: bytes, where: str) -> State:
    import safetensors.torch

    try:
        state = safetensors.torch.load(content)
    except Exception as error:  # what a truncated file raises depends on where it ends
        raise UsageError(
            f"--weights {where} is truncated, or no safetensors file ({_line(error)}): give a whole one"
        ) from error
    if not state:
        raise UsageError(f"--weights {where} has no tensors: give another file")
    return state


def _unpickled(content: bytes, where: str) -> object:
    try:
        # Many training programs save their arguments, too, and this type only holds them.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings(action="ignore"):
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # what a truncated or hostile file raises depends on its bytes
        if match := re.search(r"(?:GLOBAL|getattr|class|type) ([\w.]+) ", str(error)):
            raise UsageError(
                f"--weights {where} needs {match[1]} to be read, and code in files is not run: "
                "save model.state_dict() alone, or as .safetensors"
            ) from error
        raise UsageError(
            f"--weights {where} is truncated, or not written by torch.save ({_line(error)}): give .pt, .pth "
            "or .safetensors"
        ) from error


def _state_in(value: object, where: str) -> tuple[State, str]:
    """Return the state dict in a checkpoint, and the keys that lead to it."""
    if state := _as_state(value):
        return state, ""
    if not isinstance(value, Mapping):
        raise UsageError(f"--weights {where} holds a value of type {type(value).__name__}, no state dict")
    inner = {str(key): part for key, part in value.items() if isinstance(part, Mapping)}
    states = [key for key in inner if _as_state(inner[key])]
    for key in (*_KEYS, *states[:1] * (len(states) == 1)):
        if key in inner:
            state, rest = _state_in(inner[key], f"{where}[{key}]")
            return state, ".".join(filter(None, (key, rest)))
    content = summarize(states or value, show=repr) or "nothing"
    raise UsageError(f"--weights {where} is no state dict, which has a tensor for each name: it holds {content}")


def _as_state(value: object) -> State:
    """Return a state dict without what is no tensor of the model; empty if the value is none."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return {}
    counted = {name: tensor for name, tensor in value.items() if name != "n_averaged"}  # of AveragedModel
    tensors = {name: tensor for name, tensor in counted.items() if isinstance(tensor, torch.Tensor)}
    return tensors if len(tensors) == len(counted) else {}


def _line(error: Exception) -> str:
    text = str(error).rpartition("WeightsUnpickler error:")[2]
    return f"{type(error).__name__}: {' '.join(text.split()).partition('. ')[0]}"[:50]
