"""The tensors in a file of weights: .safetensors, or what `torch.save` wrote. Nothing in a file is executed."""

import argparse
import io
import re
import warnings
from collections.abc import Mapping

import torch

from raydali.data.sources.storage import why_pointer
from raydali.errors import UsageError
from raydali.text import summarize

State = dict[str, torch.Tensor]
_KEYS = "state_dict_ema", "model_ema", "ema", "state_dict", "model", "state"
"""Where training programs keep the weights of a checkpoint; averaged weights, which they validate, come first."""


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
    if pointer := why_pointer(content):
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
        if found := re.search(r"(?:GLOBAL|getattr|class|type) ([\w.]+) ", str(error)):
            raise UsageError(
                f"--weights {where} needs {found[1]} to be read, and code in files is not run: "
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
    inner = {str(key): each for key, each in value.items() if isinstance(each, Mapping)}
    states = [key for key in inner if _as_state(inner[key])]
    for key in (*_KEYS, *states[:1] * (len(states) == 1)):
        if key in inner:
            state, rest = _state_in(inner[key], f"{where}[{key}]")
            return state, ".".join(filter(None, (key, rest)))
    found = summarize(states or value, show=repr) or "nothing"
    raise UsageError(f"--weights {where} is no state dict, which has a tensor for each name: it holds {found}")


def _as_state(value: object) -> State:
    """Return a state dict without what is no tensor of the model; empty if the value is none."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return {}
    counted = {name: each for name, each in value.items() if name != "n_averaged"}  # of AveragedModel
    tensors = {name: each for name, each in counted.items() if isinstance(each, torch.Tensor)}
    return tensors if len(tensors) == len(counted) else {}


def _line(error: Exception) -> str:
    text = str(error).rpartition("WeightsUnpickler error:")[2]
    return f"{type(error).__name__}: {' '.join(text.split()).partition('. ')[0]}"[:50]
