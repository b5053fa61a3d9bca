"""The trained model of a run, for other programs: `model.json` and `best/model.safetensors`.

The driver writes `model.json` at the first start: how to build the model and what its inputs and outputs mean. Rank 0
writes the best weights so far, and then their epoch and score into `model.json`.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raydali.data.read.storage import reason
from raydali.errors import UsageError
from raydali.run.folder import RunFolder

if TYPE_CHECKING:
    from raydali.training.evaluation.reference import Reference

MODEL, BEST = "model.json", "best/model.safetensors"
BEST_REFERENCE = "best/reference.pt"


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
        import torch  # slow, and the driver does not need it
        from safetensors.torch import save

        # The format needs contiguous tensors that share no memory.
        tensors = {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in self.state.items()
            if isinstance(value, torch.Tensor)
        }
        content = save(tensors, {"format": "pt"})
        folder.write(BEST, content)
        if self.reference is not None:
            folder.write(BEST_REFERENCE, self.reference.content(hashlib.sha256(content).hexdigest()))
        elif folder.exists(BEST_REFERENCE):
            folder.remove(BEST_REFERENCE)
        best = {"epoch": self.epoch, "metric": self.metric, "score": self.score}
        folder.write_json(MODEL, read_model(folder) | {"best": best})


def read_model(folder: RunFolder) -> dict[str, Any]:
    """Return the contents of model.json; empty if the file does not exist or is broken."""
    with suppress(FileNotFoundError, ValueError):
        facts = folder.read_json(MODEL)
        if isinstance(facts, dict):
            return facts
    return {}


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
