"""The trained model of a run, for other programs: `model.json` and `best/model.safetensors`, or parts and their index.

The driver writes `model.json` at the first start: how to build the model and what its inputs and outputs mean. Rank 0
writes the best weights so far, and then their epoch and score into `model.json`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydali.data.read.storage import reason
from raydali.errors import UsageError
from raydali.run.folder import RunFolder

if TYPE_CHECKING:
    import torch

    from raydali.training.evaluation.reference import Reference

MODEL, BEST = "model.json", "best/model.safetensors"
BEST_INDEX, BEST_REFERENCE = f"{BEST}.index.json", "best/reference.pt"
PART_BYTES = 4 * 10**9
"""Larger weights are written in parts of at most so many bytes, with an index as Hugging Face's programs have it."""


@dataclass(frozen=True)
class BestWeights:
    """The weights with the best validation score so far.

    Attributes:
        state: the model's state dict; on the CPU when it is written.
        epoch: the epoch after which they were validated.
        metric: the name of the score.
        score: its value; higher is better.
        reference: samples of that validation, and the outputs for them.
    """

    state: Mapping[str, Any]
    epoch: int
    metric: str
    score: float
    reference: "Reference | None" = None

    def write(self, folder: RunFolder) -> None:
        """Write the weights as a state dict in the safetensors format, and then `best` of model.json."""
        parts = self._parts()
        if len(parts) == 1:
            content = _safetensors(parts[0])
            folder.write(BEST, content)
        else:
            content = self._write_parts(folder, parts)
        if self.reference is not None:
            folder.write(BEST_REFERENCE, self.reference.content(hashlib.sha256(content).hexdigest()))
        elif folder.exists(BEST_REFERENCE):
            folder.remove(BEST_REFERENCE)
        best = {"epoch": self.epoch, "metric": self.metric, "score": self.score}
        folder.write_json(MODEL, read_model(folder) | {"best": best})

    def _parts(self) -> "list[dict[str, torch.Tensor]]":
        """Divide the tensors into parts of at most PART_BYTES, in order."""
        import torch  # slow, and the driver does not need it

        parts: list[dict[str, torch.Tensor]] = [{}]
        size = 0
        for name, value in self.state.items():
            if isinstance(value, torch.Tensor):
                size += value.nbytes
                if size > PART_BYTES and parts[-1]:
                    parts.append({})
                    size = value.nbytes
                parts[-1][name] = value
        return parts

    def _write_parts(self, folder: RunFolder, parts: "Sequence[Mapping[str, torch.Tensor]]") -> bytes:
        """Write each part under a name of its own, then the index, which replaces earlier ones; return its content."""
        hashes, weight_map = dict[str, str](), dict[str, str]()
        for number, part in enumerate(parts, 1):
            file = f"model-epoch{self.epoch}-{number:05d}-of-{len(parts):05d}.safetensors"
            content = _safetensors(part)
            folder.write(f"best/{file}", content)
            hashes[file] = hashlib.sha256(content).hexdigest()
            weight_map |= dict.fromkeys(part, file)
        size = sum(tensor.nbytes for part in parts for tensor in part.values())
        metadata = {"total_size": size, "sha256": hashes}
        index = json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2).encode()
        folder.write(BEST_INDEX, index)
        for file in folder.files("best"):
            if file.endswith(".safetensors") and file not in hashes:
                folder.remove(f"best/{file}")
        return index


def _safetensors(tensors: "Mapping[str, torch.Tensor]") -> bytes:
    import torch
    from safetensors.torch import save

    # The format needs contiguous tensors that share no memory.
    alone = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    return save(alone, {"format": "pt"})


def read_model(folder: RunFolder) -> dict[str, Any]:
    """Return the contents of model.json; empty if the file does not exist or is broken."""
    with suppress(FileNotFoundError, ValueError):
        facts = folder.read_json(MODEL)
        if isinstance(facts, dict):
            return facts
    return {}


def best_file(folder: RunFolder) -> str | None:
    """Return the file of the best weights, or the index of its parts; None if there are none yet."""
    return next((file for file in (BEST, BEST_INDEX) if folder.exists(file)), None)


def best_metric(folder: RunFolder) -> str | None:
    """Return the name of the score that chooses the best weights; None if there are none yet."""
    metric: str | None = (read_model(folder).get("best") or {}).get("metric")
    return metric


def write_model(folder: RunFolder, facts: Mapping[str, Any]) -> None:
    """Write model.json at a start of the run; the best epoch and score stay.

    Raises:
        UsageError: it cannot be read or written.
    """
    try:
        earlier = read_model(folder)
        if earlier != (new := {**earlier, **facts, "best": earlier.get("best")}):
            folder.write_json(MODEL, new)
    except OSError as error:
        raise UsageError(f"{folder}/{MODEL} cannot be written: {reason(error)}: remove it") from error
