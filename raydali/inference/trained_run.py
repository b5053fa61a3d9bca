"""A trained run as its folder has it: the job with its options, the classes, and the weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from raydali.data.sources.storage import reason
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import UsageError
from raydali.inference.job_module import job_module
from raydali.inference.kinds.find import find_kind
from raydali.inference.kinds.kind import Kind
from raydali.launch.choices import OF_EARLIER_VERSIONS, with_kept
from raydali.launch.driver.resume import previous_run
from raydali.run.checkpoint_folders import MANIFEST, newest_first, newest_step
from raydali.run.find import find_run
from raydali.run.folder import CONFIG, RunFolder
from raydali.run.model_file import BEST, BEST_OF_EARLIER_VERSIONS, MODEL, read_model
from raydali.train.checkpoint_file import FILE_NAME, BadCheckpointError, load_verified
from raydali.train.weights.state_file import read_state

Checkpoint = Literal["best", "newest"]
State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run whose model can be used. Made by `open_run`.

    Attributes:
        folder: the run's.
        job: the module of its job.
        config: the options that it was trained with, of the job's class `Config`.
        facts: its model.json; empty for runs of earlier versions.
        fingerprint: of the training set.
        sha256: of the file of weights, or of the manifest that has it, 64 hex digits.
        origin: where the weights are from, for messages, such as "best/model.safetensors of epoch 7".
        state: the model's state dict, on the CPU.
    """

    folder: RunFolder
    job: ModuleType
    config: Any
    facts: Mapping[str, Any]
    fingerprint: str | None
    sha256: str
    origin: str
    state: State

    @cached_property
    def pipeline(self) -> Pipeline[Any]:
        """The pipeline of validation samples."""
        pipeline: Pipeline[Any] = self.job.val_pipeline(self.config)
        return pipeline

    @cached_property
    def kind(self) -> Kind:
        """What the job predicts.

        Raises:
            UsageError: it is no kind that can be used.
        """
        return find_kind(self.pipeline, self.config, str(self.folder))

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes in the order of the model's outputs; None if the run does not say them."""
        return tuple(self.facts["classes"]) if "classes" in self.facts else None

    def network(self, classes: int) -> nn.Module:
        """Return the trained model on the CPU, in eval mode; it takes 8-bit samples.

        Args:
            classes: the number of classes; 0 if the model has none.

        Raises:
            UsageError: the weights do not fit the job's model.
        """
        try:
            model: nn.Module = self.job.build_model(self.config, classes)
            model.load_state_dict(dict(self.state))
        except RuntimeError as error:
            why = " ".join(str(error).partition(":\n")[2].split()) or str(error)
            raise UsageError(
                f"{self.folder}/{self.origin} does not fit the model with {classes} classes ({why[:60]}): give the "
                "--job and the data of the run"
            ) from error
        return self.kind.network(model, self.config).eval()


def open_run(run: str, checkpoint: Checkpoint = "best", job: str | None = None) -> TrainedRun:
    """Read a run.

    Args:
        run: its folder, a path or a URI.
        checkpoint: best: the weights with the best validation score; newest: those of the newest checkpoint.
        job: the name or the file of its job. Default: the one that model.json names.

    Raises:
        UsageError: it is no run, has no weights yet, or its job cannot be found.
    """
    folder = find_run(run)
    facts = read_model(folder)
    classes = facts.get("classes", [])
    if not (isinstance(facts.get("job", {}), dict) and isinstance(classes, list) and {*map(type, classes)} <= {str}):
        raise UsageError(f"{folder}/{MODEL} has another form than raydali writes: remove it, and give --job")
    try:
        origin, content, state = _best(folder, facts) if checkpoint == "best" else _newest(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({reason(error)[:60]}): check the storage") from error
    module = job_module(str(folder), facts.get("job", {}), job)
    earlier = previous_run(folder, OF_EARLIER_VERSIONS)
    assert earlier is not None, "find_run has found its config.json"
    settings = earlier.settings
    known = {each.name for each in fields(module.Config)}
    given = {name: _as_tuples(value) for name, value in settings.items() if name in known}
    try:
        config = with_kept(module.Config(**given), settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder}/{CONFIG} has other settings than the job ({str(error)[:60]}): give --job"
        ) from error
    return TrainedRun(
        folder=folder,
        job=module,
        config=config,
        facts=facts,
        fingerprint=settings.get("fingerprint"),
        sha256=hashlib.sha256(content).hexdigest(),
        origin=origin,
        state=state,
    )


def _as_tuples(value: Any) -> Any:  # noqa: ANN401 (a setting)
    """A setting as it was before JSON, which has no tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _best(folder: RunFolder, facts: Mapping[str, Any]) -> tuple[str, bytes, State]:
    for name in (BEST, BEST_OF_EARLIER_VERSIONS):
        if folder.exists(name):
            content = folder.read(name)
            state, _ = read_state(content, f"{folder}/{name}")
            epoch = f" of epoch {facts['best']['epoch']}" if facts.get("best") else ""
            return f"{name}{epoch}", content, state
    instead = "give --checkpoint newest" if newest_step(folder) is not None else "train it further"
    raise UsageError(f"{folder} has no {BEST} yet, which is written after its first epoch: {instead}")


def _newest(folder: RunFolder) -> tuple[str, bytes, State]:
    """The manifest and the weights of the newest complete checkpoint: their moving average, if there is one."""
    name = next((each for each in newest_first(folder) if folder.exists(f"{each}/{MANIFEST}")), None)
    if name is None:
        raise UsageError(f"{folder} has no checkpoint yet: train it further")
    try:
        contents = folder.read(f"{name}/{MANIFEST}")
        step = json.loads(contents)["step"]
        parts = load_verified(contents, lambda file: folder.read(f"{name}/{file}"), step=step)["state"]
    except (BadCheckpointError, FileNotFoundError, ValueError, KeyError) as error:
        raise UsageError(f"{folder}/{name} cannot be used ({str(error)[:60]}): give --checkpoint best") from error
    if "ema" not in parts:
        return f"{name}/{FILE_NAME}", contents, parts["model"]
    averaged = {key.removeprefix("module."): value for key, value in parts["ema"].items() if key != "n_averaged"}
    return f"{name}/{FILE_NAME}", contents, averaged
