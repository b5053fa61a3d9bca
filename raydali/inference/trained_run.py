"""Reads a trained run from its folder: the job with its options, the classes, and the weights."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib import import_module
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import nn

from raydali.data.index.formats import check_column_options
from raydali.data.index.source import Source, TrainAndVal, classes_of
from raydali.data.load.loader import Loader
from raydali.data.load.make import make_loader
from raydali.data.read.storage import reason
from raydali.data.tasks.pipeline import Pipeline
from raydali.data.tasks.restoration import ValidationPairs
from raydali.errors import RaydaliError, UsageError
from raydali.inference.job_module import FoundRun, found_run
from raydali.inference.task_results.task_results import Columns, TaskResults
from raydali.launch.defaults import defaults_of, resolve
from raydali.run.data_contents import compared_contents
from raydali.run.find import MANIFEST, newest_first, newest_step, read_settings
from raydali.run.folder import CONFIG, EPOCHS, RunFolder
from raydali.run.model_file import BEST, BEST_REFERENCE
from raydali.text import error_line, summarize
from raydali.training.checkpoint_file import FILE_NAME, BadCheckpointError, load_verified
from raydali.training.evaluation.reference import Reference
from raydali.training.evaluation.restoration import restored_files
from raydali.training.weights.reading import read_state

Checkpoint = Literal["best", "newest"]

_log = logging.getLogger(__name__)


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
    state: Mapping[str, torch.Tensor]
    reference: Reference | None
    step: int | None


@dataclass(frozen=True, kw_only=True)
class TrainedRun(FoundRun):
    """A run whose model can be used. Made by `open_run`.

    Attributes:
        config: the options that it was trained with, of the job's class.
        settings: its config.json, with defaults for what its version did not know.
        weights: the model's.
    """

    config: Any
    settings: Mapping[str, Any]
    weights: Weights

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The classes in the order of the model's outputs; None if the run does not say them."""
        return tuple(self.facts["classes"]) if "classes" in self.facts else None

    @cached_property
    def pipeline(self) -> Pipeline[Any]:
        """The pipeline of validation samples.

        Raises:
            UsageError: the job returns something else.
        """
        pipeline = self.job.val_pipeline(self.config)
        if not hasattr(pipeline, "sample"):
            raise UsageError(
                f"val_pipeline(config) of {self.file} returns {type(pipeline).__name__}: derive it "
                "from a pipeline of raydali/data/tasks"
            )
        return pipeline

    @cached_property
    def kind(self) -> TaskResults:
        """The kind of prediction of the job's task; only its module is imported."""
        task, config = self.job.task, self.config
        if task is None:
            return TaskResults(self.job, config, self.pipeline)
        if task == "video":  # other videos are cut as `open_data` of the job has cut its own
            with suppress(RaydaliError, OSError, AttributeError):
                names = "sequence_length", "stride", "step"
                config = replace(config, **{name: getattr(self.data.val, name) for name in names})
        several = task == "classification" and getattr(config, "multi_label", False)
        place = {"video": "classification", "restoration": "task_results"}.get(task, task)
        module = import_module(f"raydali.inference.task_results.{place}")
        kind: type[TaskResults] = getattr(module, "MultiLabel" if several else task.capitalize())
        return kind(self.job, config, self.pipeline)

    @property
    def predicting(self) -> TaskResults:
        """The kind that predicts; restored images of jobs of earlier versions, without `predictions`, are PNG files."""
        predictions = self.job.predictions
        if self.job.task == "restoration":
            predictions = predictions or restored_files
            if type(self.pipeline) is not ValidationPairs:
                name = type(self.pipeline).__name__
                _log.warning("whole images are decoded as ValidationPairs does, and not by %s of the job", name)
        return self.kind if predictions is None else TaskResults(self.job, self.config, self.pipeline, predictions)

    @cached_property
    def data(self) -> TrainAndVal[Any]:
        """The training and the validation set, as the job opens them.

        Raises:
            UsageError: they cannot be opened.
        """
        return self.job.open_data(self.config)

    def labeled_samples(self, data: str | None, given: Columns) -> tuple[Source, tuple[str, ...]]:
        """Return samples with their truth, and the classes in the order of the model's outputs.

        Args:
            data: what the user gives. None: the validation samples of the run, as its job opens them.
            given: what the user gives for lists.

        Raises:
            UsageError: they cannot be opened, or have other classes than the run.
        """
        if data is not None:
            check_column_options(data, root=given.get("root"), label_column=given.get("label_column"))
            source = self.kind.open_labeled(data, self.classes, given)
            self._warn_of_changes(source)
            classes = classes_of(source)
            if self.classes and classes and self.classes != classes:
                differ = [f"{i}: {a!r}, {b!r}" for i, (a, b) in enumerate(zip_longest(self.classes, classes)) if a != b]
                raise UsageError(
                    f"the classes of the run {self.folder} and of {data} differ ({summarize(differ)}): give data with "
                    "the classes of the run, in their order"
                )
            return source, classes if self.classes is None else self.classes
        train, classes = self.data.train, classes_of(self.data.train)
        if self.classes is not None and self.classes != classes:
            raise UsageError(f"{train} has other classes than the run {self.folder} had: give --data")
        if self.settings.get("fingerprint") not in (None, train.fingerprint):
            _log.warning("%s is not what %s was trained on: it may have seen validation samples", train, self.folder)
        self._warn_of_changes(train, self.data.val)
        return self.data.val, classes

    def _warn_of_changes(self, *sources: Source) -> None:
        """Warn of samples with names and labels of the run whose files have changed; others are other data."""
        if changed := compared_contents(self.folder, sources)[0]:
            _log.warning("files have other contents than when %s read them: %s", self.folder, changed)

    @property
    def make_loader(self) -> Callable[..., Loader]:
        """The function that makes loaders; see `make_loader`."""
        return make_loader if self.job.loader is None else self.job.loader(self.config)

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


def open_run(run: str | FoundRun, checkpoint: Checkpoint = "best", job: str | None = None) -> TrainedRun:
    """Read a run.

    Args:
        run: its folder, a path or a URI, or what `found_run` has found.
        checkpoint: best: the weights with the best validation score; newest: the weights of the newest checkpoint.
        job: the name or the file of its job. Default: the one that model.json names.

    Raises:
        UsageError: it is no run, has no weights yet, or its job cannot be found.
    """
    located = run if isinstance(run, FoundRun) else found_run(run, job)
    folder, options = located.folder, located.job.config
    try:
        weights = _best(folder, located.facts) if checkpoint == "best" else _newest(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({reason(error)[:60]}): check the storage") from error
    settings = defaults_of(options) | read_settings(folder)
    names = {option.name for option in fields(options)}
    values = {name: _as_tuples(value) for name, value in settings.items() if name in names}
    try:
        config = resolve(options(**values), settings)
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{folder}/{CONFIG} has other settings than the job ({str(error)[:60]}): give --job"
        ) from error
    return TrainedRun(**vars(located), config=config, settings=settings, weights=weights)


def _as_tuples(value: Any) -> Any:  # noqa: ANN401 (a setting)
    """A setting as it was before JSON, which has no tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _best(folder: RunFolder, facts: Mapping[str, Any]) -> Weights:
    if not folder.exists(BEST):
        instead = "give --checkpoint newest" if newest_step(folder) is not None else "train it further"
        raise UsageError(f"{folder} has no {BEST} yet, which is written after its first epoch: {instead}")
    content = folder.read(BEST)
    state, _ = read_state(content, f"{folder}/{BEST}")
    best = facts.get("best")
    rows = folder.rows(EPOCHS) if best else ()
    return Weights(
        origin=f"{BEST} of epoch {best['epoch']}" if best else BEST,
        sha256=hashlib.sha256(content).hexdigest(),
        state=state,
        reference=_reference_of_best(folder),
        step=next((row["step"] for row in rows if row["epoch"] == best["epoch"]), None) if best else None,
    )


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
    name = next((name for name in newest_first(folder) if folder.exists(f"{name}/{MANIFEST}")), None)
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
        reference=Reference(**reference) if reference is not None else None,
        step=step,
    )
