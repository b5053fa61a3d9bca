"""A run in other programs' eyes: TensorBoard's files always; MLflow and Weights & Biases where they are asked for.

The driver tells them: settings at the start, numbers at each epoch. What they call the run is kept in the run's
`tracking.json`, so that a resumed run goes on there too. Where and as whom they are reached is theirs to know, by
MLFLOW_TRACKING_URI, WANDB_API_KEY and the like.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from queue import Queue
from threading import Thread
from typing import Any, Literal, Protocol

from raydali.errors import UsageError
from raydali.report.scalars import scalars
from raydali.report.tensorboard import TensorBoard
from raydali.run.folder import RunFolder

IDS = "tracking.json"
PROJECT = "raydali"
"""MLflow's experiment, and W&B's project, unless MLFLOW_EXPERIMENT_NAME and WANDB_PROJECT say another."""

END_SECONDS = 30.0
"""For which the driver waits at its end for what trackers have yet to take."""

Record = Mapping[str, Any]
End = Literal["finished", "failed", "interrupted"]


class Tracker(Protocol):
    """A program that keeps runs."""

    @property
    def id(self) -> str:
        """What it calls this run."""
        ...

    def epoch(self, record: Record) -> None:
        """Take over a line of `epochs.jsonl`."""
        ...

    def end(self, how: End) -> None:
        """The driver goes away."""
        ...


class MlflowTracker:
    """A run of MLflow: new, or with the `id` that it had."""

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
        # MLflow lets no parameter change: those of the first start stay.
        known = self._client.get_run(id).data.params
        params = [Param(name, str(value)[:500]) for name, value in settings.items() if name not in known]
        self._client.log_batch(id, params=params)

    def epoch(self, record: Record) -> None:
        """See Tracker; MLflow's step is the optimiser's."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, record["step"]) for name, value in scalars(record).items()]
        self._client.log_batch(self.id, metrics=metrics)

    def end(self, how: End) -> None:
        """See Tracker."""
        status = {"finished": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}[how]
        self._client.set_terminated(self.id, status)


class WandbTracker:
    """A run of Weights & Biases: new, or with the `id` that it had."""

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
        """See Tracker; all charts are over the optimiser's step."""
        self._run.log(scalars(record) | {"step": record["step"]})

    def end(self, how: End) -> None:
        """See Tracker."""
        self._run.finish(exit_code=0 if how == "finished" else 1)


TRACKERS: dict[str, Callable[[RunFolder, Mapping[str, Any], str | None], Tracker]] = {
    "mlflow": MlflowTracker,
    "wandb": WandbTracker,
}
"""By the names of their packages."""


def asked_trackers(track: str | None) -> tuple[str, ...]:
    """The names in a comma list.

    Raises:
        UsageError: an unknown name, or a package that is not installed.
    """
    names = tuple(dict.fromkeys(name.strip() for name in track.split(","))) if track is not None else ()
    for name in names:
        if name not in TRACKERS:
            raise UsageError(f"--track {track} must be a comma list of {', '.join(TRACKERS)}, not {name!r}")
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a folder `wandb` of runs looks like a package without an origin
            raise UsageError(f"--track {name} needs the package {name}: pip install {name}, or leave it out")
    return names


@contextmanager
def tracked(
    folder: RunFolder, names: tuple[str, ...], settings: Mapping[str, Any], warn: Callable[[str], None]
) -> Iterator[Callable[[Record], None]]:
    """Start the trackers, and end them as what is inside ends; gives what takes the lines of `epochs.jsonl`.

    Once they are started, a tracker that fails costs a warning, never the run, and one that does not answer holds
    nobody up.

    Args:
        names: from `asked_trackers`.
        settings: the run's, as `config.json` has them.
        warn: takes a line.

    Raises:
        UsageError: a tracker does not start.
    """
    ids: dict[str, str] = folder.read_json(IDS) if folder.exists(IDS) else {}
    trackers: dict[str, Tracker] = {}
    board = TensorBoard(folder)

    def take(record: Record) -> None:
        attempt("TensorBoard's file", partial(board.epoch, record))
        for name, tracker in trackers.items():
            attempt(name, partial(tracker.epoch, record))

    def attempt(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            warn(f"{name} did not take an epoch or the end: {type(error).__name__}: {error}")

    def end() -> None:
        for name, tracker in reversed(trackers.items()):
            attempt(name, partial(tracker.end, how))

    def work() -> None:
        while (call := calls.get()) is not None:
            call()

    how: End = "failed"
    calls: Queue[Callable[[], None] | None] = Queue()
    # On a thread of their own: they may try again for minutes, while the driver must look after the run.
    worker = Thread(target=work, daemon=True, name="trackers")
    worker.start()
    try:
        for name in names:
            try:
                tracker = TRACKERS[name](folder, settings, ids.get(name))
            except Exception as error:
                raise UsageError(f"--track {name} does not start: {error}; mend that, or leave it out") from error
            trackers[name] = tracker
            if ids.get(name) != tracker.id:
                ids[name] = tracker.id
                folder.write_json(IDS, ids)
        yield lambda record: calls.put(partial(take, record))
        how = "finished"
    except KeyboardInterrupt:
        how = "interrupted"
        raise
    finally:
        calls.put(end)
        calls.put(None)
        worker.join(END_SECONDS)
        if worker.is_alive():
            warn(f"{', '.join(['TensorBoard', *names])} have not taken all within {END_SECONDS:g} s of the end")
