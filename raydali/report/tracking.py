"""Experiment trackers: TensorBoard's files always, MLflow and Weights & Biases if `--track` names them.

The driver sends them the settings at the start and the numbers of each epoch. Their ids of the run are kept in its
`tracking.json`, so that a resumed run continues there too. Server and account come from their own environment
variables, such as MLFLOW_TRACKING_URI and WANDB_API_KEY.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

from raydali.data.read.storage import reason
from raydali.errors import UsageError
from raydali.host.background import Background
from raydali.report.tensorboard import TensorBoard, scalars
from raydali.run.folder import RunFolder
from raydali.text import printable

IDS = "tracking.json"
PROJECT = "raydali"
"""Default of MLflow's experiment and of W&B's project; MLFLOW_EXPERIMENT_NAME and WANDB_PROJECT override it."""

END_SECONDS = 30.0
"""How long the driver waits at its end for trackers to take what is queued."""

Record = Mapping[str, Any]
End = Literal["finished", "failed", "interrupted"]


class MlflowTracker:
    """A run of MLflow: a new one, or the one of this `id`."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], id: str | None) -> None:
        import mlflow
        from mlflow.entities import Param

        self._client = mlflow.MlflowClient()
        if id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            experiment = self._client.get_experiment_by_name(name)
            place = experiment.experiment_id if experiment else self._client.create_experiment(name)
            id = self._client.create_run(place, run_name=folder.name, tags={"raydali.folder": str(folder)}).info.run_id
        else:
            self._client.update_run(id, status="RUNNING")
        self.id: str = id
        # MLflow does not let parameters change: the first start's parameters stay.
        logged = self._client.get_run(id).data.params
        params = [Param(name, printable(str(value))[:500]) for name, value in settings.items() if name not in logged]
        self._client.log_batch(id, params=params)

    def epoch(self, record: Record) -> None:
        """Record a line of `epochs.jsonl`; MLflow's step is the optimizer's."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = {re.sub(r"[^\w.\- :/]", "_", name): value for name, value in scalars(record).items()}
        metrics = [Metric(name, value, now, record["step"]) for name, value in numbers.items()]
        self._client.log_batch(self.id, metrics=metrics)

    def end(self, how: End) -> None:
        """Record that the driver ends."""
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[how]
        self._client.set_terminated(self.id, status)


class WandbTracker:
    """A run of Weights & Biases: a new one, or the one of this `id`."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], id: str | None) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=id,
            resume="allow",
            config=dict(settings),
            allow_val_change=True,
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id: str = self._run.id
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def epoch(self, record: Record) -> None:
        """Record a line of `epochs.jsonl`; all charts are over the optimizer's step."""
        self._run.log(scalars(record) | {"step": record["step"]})

    def end(self, how: End) -> None:
        """Record that the driver ends."""
        self._run.finish(exit_code=0 if how == "finished" else 1)


Tracker = MlflowTracker | WandbTracker
TRACKERS: dict[str, type[Tracker]] = {"mlflow": MlflowTracker, "wandb": WandbTracker}
"""Trackers by the names of their packages."""


def parse_trackers(track: str | None) -> tuple[str, ...]:
    """The names in a comma list.

    Raises:
        UsageError: an unknown name, or a package that is not installed.
    """
    names = tuple(dict.fromkeys(name.strip() for name in track.split(","))) if track is not None else ()
    for name in names:
        if name == "tensorboard":
            raise UsageError("--track tensorboard is not needed: each run writes tensorboard/; give mlflow or wandb")
        if name not in TRACKERS:
            raise UsageError(f"--track must be names such as {','.join(TRACKERS)}, separated by commas, not {name!r}")
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder `wandb` of runs looks like a package without an origin
            raise UsageError(f"--track {name} needs the package {name}: pip install {name}, or leave it out")
    return names


@contextmanager
def tracked(
    folder: RunFolder, names: tuple[str, ...], settings: Mapping[str, Any], warn: Callable[[str], None]
) -> Iterator[Callable[[Record], None]]:
    """Start the trackers, and end them with the status of the `with` block; yields a function for each epoch's record.

    Once they are started, a tracker that fails costs a warning, never the run, and one that does not answer blocks
    nothing.

    Args:
        folder: the run's.
        names: from `parse_trackers`.
        settings: the content of `config.json`.
        warn: takes a line.

    Raises:
        UsageError: a tracker does not start.
    """
    ids: dict[str, str] = folder.read_json(IDS) if folder.exists(IDS) else {}
    trackers: dict[str, Tracker] = {}
    board = TensorBoard(folder)

    def epoch(record: Record) -> None:
        attempt("TensorBoard's file", board.epoch, record)
        for name, tracker in trackers.items():
            attempt(name, tracker.epoch, record)

    def end() -> None:
        for name, tracker in reversed(trackers.items()):
            attempt(name, tracker.end, how)

    def attempt(name: str, call: Callable[[Any], None], value: object) -> None:
        try:
            call(value)
        except Exception as error:
            warn(f"{name} did not receive an epoch or the end: {type(error).__name__}: {reason(error)}")

    how: End = "failed"
    # On a thread of their own: they may retry for minutes, while the driver must supervise the run.
    background = Background("trackers")
    try:
        for name in names:
            try:
                tracker = TRACKERS[name](folder, settings, ids.get(name))
            except Exception as error:
                text = f"--track {name} cannot start: {reason(error)}; correct that, or leave it out"
                raise UsageError(text) from error
            trackers[name] = tracker
            if ids.get(name) != tracker.id:
                ids[name] = tracker.id
                folder.write_json(IDS, ids)
        yield lambda record: background.calls.put(partial(epoch, record))
        how = "finished"
    except KeyboardInterrupt:
        how = "interrupted"
        raise
    finally:
        background.calls.put(end)
        if not background.done().wait(END_SECONDS):
            late = ", ".join(["TensorBoard", *names])
            warn(f"{late} did not receive everything within {END_SECONDS:g} s after the end")
