"""Reads a trained run from its folder: the job with its options, the classes, and the weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import nn

from raydali.data.index.source import TrainAndVal
from raydali.data.load.loader import Loader
from raydali.data.load.make import make_loader
from raydali.data.read.storage import reason
from raydali.data.tasks.pipeline import Pipeline
from raydali.errors import UsageError
from raydali.inference.job_module import FoundRun, found_run
from raydali.options.defaults import defaults_of, resolve
from raydali.run.checkpoints import read_checkpoint
from raydali.run.find import complete_ones, newest_step, read_settings, step_of
from raydali.run.folder import CONFIG, EPOCHS, RunFolder
from raydali.run.model_file import BEST, BEST_REFERENCE
from raydali.text import error_line
from raydali.training.checkpoint_file import FILE_NAME, BadCheckpointError
from raydali.training.evaluation.reference import Reference
from raydali.training.weights.reading import read_best
from raydali.training.weights.undrawn import undrawn

Checkpoint = Literal["best", "newest"]


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
    def data(self) -> TrainAndVal[Any]:
        """The training and the validation set, as the job opens them.

        Raises:
            UsageError: they cannot be opened.
        """
        return self.job.open_data(self.config)

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
            model = undrawn(partial(self.job.build_model, self.config, classes))
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
    folder = located.folder
    try:
        weights = _best(folder, located.facts) if checkpoint == "best" else _newest(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be read ({reason(error)[:60]}): check the storage") from error
    config, settings = options_of(located)
    return TrainedRun(**vars(located), config=config, settings=settings, weights=weights)


def options_of(run: FoundRun) -> tuple[Any, dict[str, Any]]:
    """Return the options of a run, of its job's class, and its config.json with defaults for what it lacks.

    Raises:
        UsageError: the job has other options.
    """
    options = run.job.config
    settings = defaults_of(options) | read_settings(run.folder)
    names = {option.name for option in fields(options)}
    values = {name: _as_tuples(value) for name, value in settings.items() if name in names}
    try:
        return resolve(options(**values), settings), settings
    except (TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{run.folder}/{CONFIG} has other settings than the job ({str(error)[:60]}): give --job"
        ) from error


def _as_tuples(value: Any) -> Any:  # noqa: ANN401 (a setting)
    """A setting as it was before JSON, which has no tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _best(folder: RunFolder, facts: Mapping[str, Any]) -> Weights:
    found = read_best(lambda file: folder.read(file) if folder.exists(file) else None, str(folder))
    if found is None:
        instead = "give --checkpoint newest" if newest_step(folder) is not None else "train it further"
        raise UsageError(f"{folder} has no {BEST} yet, which is written after its first epoch: {instead}")
    file, sha256, state = found
    best = facts.get("best")
    rows = folder.rows(EPOCHS) if best else ()
    return Weights(
        origin=f"{file} of epoch {best['epoch']}" if best else file,
        sha256=sha256,
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
    name = next(complete_ones(folder), None)
    if name is None:
        raise UsageError(f"{folder} has no checkpoint yet: train it further")
    try:
        checkpoint = read_checkpoint(folder, name)
    except BadCheckpointError as error:
        raise UsageError(f"{folder}/{name} cannot be used ({str(error)[:60]}): give --checkpoint best") from error
    parts, reference = checkpoint["state"], checkpoint.get("reference")
    state = parts["model"]
    if "ema" in parts:
        state = {key.removeprefix("module."): value for key, value in parts["ema"].items() if key != "n_averaged"}
    return Weights(
        origin=f"{name}/{FILE_NAME}",
        sha256=checkpoint["sha256"],
        state=state,
        reference=Reference(**reference) if reference is not None else None,
        step=step_of(name),
    )
