"""A trained run as its folder has it: the job with its options, the classes, and the weights."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

from raydali.data.loading.loader import Loader
from raydali.data.loading.make import make_loader
from raydali.data.sources.file_rules import FILE_RULES, following
from raydali.data.sources.source import TrainAndVal
from raydali.data.sources.storage import reason
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import RaydaliError, UsageError
from raydali.inference.job_module import FoundJob, job_of
from raydali.inference.kinds.kind import Kind
from raydali.inference.kinds.own import OwnTask
from raydali.launch.defaults import defaults_of, resolve
from raydali.launch.driver.resume import previous_run
from raydali.launch.job import Job
from raydali.run.find import MANIFEST, find_run, newest_first, newest_step
from raydali.run.folder import CONFIG, EPOCHS, RunFolder
from raydali.run.model_file import BEST, BEST_OF_EARLIER_VERSIONS, BEST_REFERENCE, MODEL, read_model
from raydali.text import error_line
from raydali.train.checkpoint_file import FILE_NAME, BadCheckpointError, load_verified
from raydali.train.evaluation.reference import Reference
from raydali.train.weights.state_file import read_state

Checkpoint = Literal["best", "newest"]
State = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The weights of a run.

    Attributes:
        origin: where they are from, for messages, such as "best/model.safetensors of epoch 7".
        sha256: of their file, or of the manifest that has it, 64 hex digits.
        state: the model's state dict, on the CPU.
        reference: samples of the validation of these weights; None if none were kept.
        step: after which they were validated; None if the run does not say.
    """

    origin: str
    sha256: str
    state: State
    reference: Reference | None
    step: int | None


@dataclass(frozen=True, kw_only=True)
class TrainedRun:
    """A run whose model can be used. Made by `open_run`.

    Attributes:
        folder: the run's.
        found: its job.
        config: the options that it was trained with, of the job's class.
        facts: its model.json; empty for runs of earlier versions.
        fingerprint: of the training set.
        rules: those by which its files became samples, see data/sources/file_rules.py.
        weights: the model's.
    """

    folder: RunFolder
    found: FoundJob
    config: Any
    facts: Mapping[str, Any]
    fingerprint: str | None
    rules: int
    weights: Weights

    @property
    def job(self) -> Job[Any]:
        """The job: all that concerns its data, network and evaluation is taken from there."""
        return self.found.job

    @cached_property
    def pipeline(self) -> Pipeline[Any]:
        """The pipeline of validation samples.

        Raises:
            UsageError: the job returns something else.
        """
        pipeline = self.job.val_pipeline(self.config)
        if not hasattr(pipeline, "sample"):
            raise UsageError(
                f"val_pipeline(config) of {self.found.file} returns {type(pipeline).__name__}: derive it "
                "from a pipeline of raydali/data/tasks"
            )
        return pipeline

    @cached_property
    def kind(self) -> Kind:
        """The kind of prediction of the job's task; only its module is imported."""
        task = self.job.task
        if task is None:
            return OwnTask(self.job, self.config)
        several = task == "classification" and getattr(self.config, "multi_label", False)
        module, name = ("multi_label", "MultiLabel") if several else (task, task.capitalize())
        kind: Kind = getattr(import_module(f"raydali.inference.kinds.{module}"), name)()
        return kind

    @cached_property
    def data(self) -> TrainAndVal[Any]:
        """The training and the validation set, as the job opens them.

        Raises:
            UsageError: they cannot be opened.
        """
        with following(self.rules):
            return self.job.open_data(self.config)

    @property
    def reading(self) -> Any:  # noqa: ANN401 (a job's)
        """The options by which other samples are read; clips are cut as `open_data` of the job has cut them."""
        try:
            val = self.data.val
        except (RaydaliError, OSError):
            return self.config
        names = (name for name in ("sequence_length", "stride", "step") if hasattr(val, name))
        return replace(self.config, **{name: getattr(val, name) for name in names})

    @property
    def make_loader(self) -> Callable[..., Loader]:
        """The function that makes loaders; see `make_loader`."""
        return make_loader if self.job.loader is None else self.job.loader(self.config)

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes in the order of the model's outputs; None if the run does not say them."""
        return tuple(self.facts["classes"]) if "classes" in self.facts else None

    def network(self, classes: int) -> nn.Module:
        """Return the trained network on the CPU, in eval mode; it takes what the loader delivers.

        Args:
            classes: the number of classes; 0 if the model has none.

        Raises:
            UsageError: the weights do not fit the job's model.
        """
        try:
            model: nn.Module = self.job.build_model(self.config, classes)
            model.load_state_dict(dict(self.weights.state))
        except RuntimeError as error:
            why = " ".join(str(error).partition(":\n")[2].split()) or str(error)
            raise UsageError(
                f"{self.folder}/{self.weights.origin} does not fit the model with {classes} classes ({why[:60]}): give "
                "the --job and the data of the run"
            ) from error
        network: nn.Module = self.job.network(model, self.config).eval()
        layouts = {4: torch.channels_last, 5: torch.channels_last_3d}
        for parameter in network.parameters():
            if parameter.dim() in layouts:
                parameter.data = parameter.data.contiguous(memory_format=layouts[parameter.dim()])
        return network


def open_run(run: str, checkpoint: Checkpoint = "best", job: str | FoundJob | None = None) -> TrainedRun:
    """Read a run.

    Args:
        run: its folder, a path or a URI.
        checkpoint: best: the weights with the best validation score; newest: those of the newest checkpoint.
        job: its job, or the name or the file of it. Default: the one that model.json names.

    Raises:
        UsageError: it is no run, has no weights yet, or its job cannot be found.
    """
    folder = find_run(run)
    facts = read_model(folder)
    classes = facts.get("classes", [])
    if not (isinstance(classes, list) and {*map(type, classes)} <= {str}):
        raise UsageError(f"{folder}/{MODEL} has another form than raydali writes: remove it, and give --job")
    try:
        weights = _best(folder, facts) if checkpoint == "best" else _newest(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({reason(error)[:60]}): check the storage") from error
    found = job if isinstance(job, FoundJob) else job_of(folder, job)
    earlier = previous_run(folder, defaults_of(found.job.config))
    assert earlier is not None, "find_run has found its config.json"
    settings = earlier.settings
    known = {each.name for each in fields(found.job.config)}
    given = {name: _as_tuples(value) for name, value in settings.items() if name in known}
    try:
        config = resolve(found.job.config(**given), settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder}/{CONFIG} has other settings than the job ({str(error)[:60]}): give --job"
        ) from error
    return TrainedRun(
        folder=folder,
        found=found,
        config=config,
        facts=facts,
        fingerprint=settings.get("fingerprint"),
        rules=settings[FILE_RULES],
        weights=weights,
    )


def _as_tuples(value: Any) -> Any:  # noqa: ANN401 (a setting)
    """A setting as it was before JSON, which has no tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _best(folder: RunFolder, facts: Mapping[str, Any]) -> Weights:
    for name in (BEST, BEST_OF_EARLIER_VERSIONS):
        if folder.exists(name):
            content = folder.read(name)
            state, _ = read_state(content, f"{folder}/{name}")
            best = facts.get("best")
            rows = folder.rows(EPOCHS) if best else ()
            return Weights(
                origin=f"{name} of epoch {best['epoch']}" if best else name,
                sha256=hashlib.sha256(content).hexdigest(),
                state=state,
                reference=_reference_of_best(folder) if name == BEST else None,
                step=next((row["step"] for row in rows if row["epoch"] == best["epoch"]), None) if best else None,
            )
    instead = "give --checkpoint newest" if newest_step(folder) is not None else "train it further"
    raise UsageError(f"{folder} has no {BEST} yet, which is written after its first epoch: {instead}")


def _reference_of_best(folder: RunFolder) -> Reference | None:
    if not folder.exists(BEST_REFERENCE):
        return None
    try:
        return Reference.of_content(folder.read(BEST_REFERENCE))
    except OSError:
        raise
    except Exception as error:  # of a broken file
        raise UsageError(f"{folder}/{BEST_REFERENCE} is broken ({error_line(error)[:60]}): remove it") from error


def _newest(folder: RunFolder) -> Weights:
    """The weights of the newest complete checkpoint: their moving average, if there is one."""
    name = next((each for each in newest_first(folder) if folder.exists(f"{each}/{MANIFEST}")), None)
    if name is None:
        raise UsageError(f"{folder} has no checkpoint yet: train it further")
    try:
        contents = folder.read(f"{name}/{MANIFEST}")
        step = json.loads(contents)["step"]
        checkpoint = load_verified(contents, lambda file: folder.read(f"{name}/{file}"), step=step)
        parts, reference = checkpoint["state"], checkpoint.get("reference")
    except (BadCheckpointError, FileNotFoundError, ValueError, KeyError) as error:
        raise UsageError(f"{folder}/{name} cannot be used ({str(error)[:60]}): give --checkpoint best") from error
    state = parts["model"]
    if "ema" in parts:
        state = {key.removeprefix("module."): value for key, value in parts["ema"].items() if key != "n_averaged"}
    return Weights(
        origin=f"{name}/{FILE_NAME}",
        sha256=hashlib.sha256(contents).hexdigest(),
        state=state,
        reference=Reference.of_state(reference) if reference is not None else None,
        step=step,
    )
