"""Reference samples of a validation: what the network was given, and what it answered, for those who use it later.

    file --> input of 8 bits --> outputs

A checkpoint of an epoch and `best/` keep them. A command that builds the network again, on whatever machine, shows by
them that it computes what the run computed. Outputs are computed in 32-bit floats, eagerly, without autocast
and TF32, before any threshold or selection.
"""

import hashlib
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from raydali.data.index.source import Source
from raydali.data.load.loader import Batch, Loader
from raydali.training.checkpoint_file import serialize, tensors_in
from raydali.training.evaluation.validation import ValidationForward, evaluating

_log = logging.getLogger(__name__)

SAMPLES = 4
"""Samples that are kept, of the first batch of rank 0."""
VALUES = 2**14
"""Values of a sample's output that are kept at most: every n-th."""
LARGEST_FILE = 2**20
"""Bytes up to which the file of a sample is kept; of a larger one only the hash."""


@dataclass(frozen=True)
class Reference:
    """Some samples of a validation.

    Attributes:
        facts: "ids", "paths" and "files" (hashes) of the samples; "samples" and "fingerprint" of the validation set;
            "input", the loader's name of what the network was given, None if the job's code had changed it; "device"
            that decoded it; and "weights", the hash of the file of weights, in `best/`.
        inputs: what the network was given, (K, ...), on the CPU.
        outputs: see `raw_outputs`, each (K, values) float32, on the CPU.
        files: the files of each sample, uint8, if they are small.
    """

    facts: dict[str, Any]
    inputs: torch.Tensor
    outputs: Sequence[torch.Tensor]
    files: Sequence[Sequence[torch.Tensor]] = ()

    @property
    def state(self) -> dict[str, Any]:
        """Tensors and plain values, for a checkpoint: the arguments by name."""
        return dict(vars(self))

    def content(self, weights: str) -> memoryview:
        """Return the content of a file, which belongs to the weights whose file has this SHA-256."""
        return serialize({**self.state, "facts": {**self.facts, "weights": weights}})

    @classmethod
    def of_content(cls, content: bytes) -> Self:
        """Return what `content` was; raises errors of many kinds if it is broken."""
        return cls(**torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))


def raw_outputs(network: nn.Module, samples: torch.Tensor) -> list[torch.Tensor]:
    """Compute the outputs of a network in 32-bit floats, each (K, values) float32 on the CPU.

    Args:
        network: maps samples to a tensor or to nested tensors, whose first dimension counts the samples. Its
            method `raw_outputs`, if it has one, does so in its place.
        samples: (K, ...), on the device of the network.

    Raises:
        ValueError: a tensor has not as many rows as there are samples.
    """
    compute = getattr(network, "raw_outputs", network)
    with evaluating(network), torch.inference_mode(), _exact(samples.device):
        tensors = [*tensors_in(compute(samples))]
    if not tensors or any(tensor.shape[:1] != samples.shape[:1] for tensor in tensors):
        raise ValueError("the network does not return a row for each sample: give it a method raw_outputs that does")
    return [_thinned(tensor) for tensor in tensors]


@contextmanager
def _exact(device: torch.device) -> Iterator[None]:
    """Compute without autocast, without TF32, and without trying which kernels are fastest."""
    matmul = torch.backends.cuda.matmul
    was, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with (
            torch.autocast(device.type, enabled=False),
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False),
        ):
            yield
    finally:
        matmul.allow_tf32 = was


def _thinned(output: torch.Tensor) -> torch.Tensor:
    flat = output.detach().reshape(len(output), -1)
    return flat[:, :: max(1, -(-flat.shape[1] // VALUES))].float().cpu().clone()


class ReferenceWatch:
    """Finds which module a validation gives the samples to, whatever the job's code says, and takes the reference.

    Args:
        loader: the loader of validation samples.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._newest: Batch | None = None
        self._seen: tuple[nn.Module, torch.Tensor, str | None, list[int]] | None = None
        self._files: tuple[list[int], list[list[bytes]]] | None = None

    @contextmanager
    def watching(self) -> Iterator[Loader]:
        """Watch the validation inside this context, which takes the batches of the loader.

        The first call of a module with as many rows as the newest batch is taken for the network's call.
        """
        self._seen = self._newest = None

        def handed_out(batch: Batch) -> None:
            self._newest = batch

        def called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            first, batch = inputs[0] if inputs else None, self._newest
            if batch is not None and isinstance(first, torch.Tensor) and first.shape[:1] == (len(batch.ids),):
                handle.remove()
                name = next((name for name, tensor in batch.tensors.items() if tensor is first), None)
                self._seen = module, first[:SAMPLES].clone(), name, batch.ids[:SAMPLES].tolist()

        self._loader.on_batch = handed_out
        handle = nn.modules.module.register_module_forward_pre_hook(called)
        try:
            yield self._loader
        finally:
            handle.remove()
            self._loader.on_batch = self._newest = None

    def take(self) -> Reference | None:
        """Return the reference of the last validation, with the weights as they are now; None if there is none.

        What fails here must not end a run: it is logged.
        """
        seen, self._seen = self._seen, None
        try:
            return self._reference(*seen) if seen is not None else None
        except Exception as error:
            _log.warning("no samples of the validation are kept for evaluate, predict and export: %s", error)
            return None

    def _reference(self, network: nn.Module, inputs: torch.Tensor, name: str | None, ids: list[int]) -> Reference:
        while isinstance(network, ValidationForward):
            network = network.model
        source = self._loader.source
        if self._files is None or self._files[0] != ids:
            self._files = ids, [files_of(source, id) for id in ids]
        files = self._files[1]
        facts = {
            "ids": ids,
            "paths": [source.path(id) for id in ids],
            "files": [[*map(sha256, contents)] for contents in files],
            "samples": len(source),
            "fingerprint": source.fingerprint,
            "input": name,
            "device": self._loader.device.type,
        }
        kept = [
            [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in contents if 0 < len(one) <= LARGEST_FILE]
            for contents in files
        ]
        return Reference(facts, inputs.cpu(), raw_outputs(network, inputs), kept)


def files_of(source: Source, id: int) -> list[bytes]:
    """Return the contents of the files of a sample; none if they cannot be read, or the source does not say how."""
    parts = [source, getattr(source, "inputs", None), getattr(source, "targets", None)]
    try:
        return [part.read(id) for part in parts if hasattr(part, "read")]  # type: ignore[union-attr]
    except Exception:  # of files, of storages; a validation has read them, and what is not kept is not compared
        return []


def sha256(content: bytes) -> str:
    """Return the SHA-256 of a file, 64 hex digits."""
    return hashlib.sha256(content).hexdigest()
