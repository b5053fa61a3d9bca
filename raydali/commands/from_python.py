"""Trains from Python and notebooks: a job runs in a process of its own, as from the command line, and a `Run` is left.

    run = raydali.train("imagenet", data="~/pets", epochs=10, on_epoch=print)
    run.epochs, run.best, run.evaluate(), run.predict("photos", "labels.csv"), run.export()

A process of its own leaves this one as it was: without Ray, signal handlers and memory of a GPU. It may train again.
"""

import html
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from raydali.errors import CommandError, RaydaliError, TrainingError, UsageError
from raydali.host.interrupts import ENDS_WITH_INPUT
from raydali.launch.driver.job_file import PROGRAM, find_job
from raydali.launch.driver.launcher import new_name
from raydali.run.folder import USUAL_STORAGE

if TYPE_CHECKING:
    from raydali.report.html.history import Epoch, History

_ERROR = "error: "
"""Begins the last message of a command that fails."""
_LAST = 100
"""Lines that are kept of what a command writes."""
_training: set[str] = set()
"""The runs that this process trains."""


def train(job: str, /, *, on_epoch: Callable[[dict[str, Any]], object] | None = None, **options: Any) -> "Run":
    """Train a job, or resume its run, and return the run.

    Args:
        job: the name of one of raydali's jobs, such as "imagenet", or a file.
        on_epoch: is called with the row of each epoch, as in `Run.epochs`, soon after it ended. If it raises an error,
            the run is interrupted, and leaves a checkpoint.
        options: the job's, as on its command line: `global_batch_size=256`, `ceiling=False` for `--no-ceiling`; a list
            for several values; None for the default.

    Raises:
        UsageError: there is no such job or option, or a value cannot be used.
        TrainingError: the run ended early; the message is the worker's own error.
        KeyboardInterrupt: it was interrupted, and has left a checkpoint.
    """
    file = find_job(job)
    given = {"storage": USUAL_STORAGE, "name": new_name(file.stem)} | {
        k: v for k, v in options.items() if v is not None
    }
    run = Run(f"{given['storage']}/{given['name']}")
    if run.folder in _training:
        raise UsageError(
            f"this process trains {run.folder} already: wait until that call returns, or give another name"
        )
    told = len(run.epochs) if on_epoch is not None and run.exists() else 0

    def tell() -> None:
        nonlocal told
        if on_epoch is not None and run.exists():
            for row in run.epochs[told:]:
                told += 1
                on_epoch(row)

    _training.add(run.folder)
    try:
        command = [sys.executable, str(file), *_arguments(given)]
        with _called(command, TrainingError, {PROGRAM: f"raydali train {job}", ENDS_WITH_INPUT: "1"}) as lines:
            for line in lines:
                print(line, end="", flush=True)
                tell()
        tell()
    finally:
        _training.discard(run.folder)
    return run


class Run:
    """A run, which `train` or a command line has trained.

    Args:
        run: its folder, a path or a URI, or its name in the usual storage.

    Attributes:
        folder: its absolute path or URI.
    """

    def __init__(self, run: str) -> None:
        from raydali.run.find import place_of

        self.folder = place_of(run)

    def __repr__(self) -> str:
        return f"Run({self.folder!r})"

    def exists(self) -> bool:
        """Return whether the folder holds a run."""
        from raydali.run.find import find_run

        try:
            find_run(self.folder)
        except UsageError:
            return False
        return True

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """A row for each epoch: "epoch", "verdict", and the numbers of docs/run-folder.md.

        Those of a validation begin with "validation/". `pandas.DataFrame(run.epochs)` is a table.
        """
        return [_row(epoch) for epoch in self._history().epochs]

    @property
    def best(self) -> dict[str, Any] | None:
        """The "epoch" with the best score of a validation, its "metric" and "score", and the file of its "weights"."""
        from raydali.run.find import find_run
        from raydali.run.model_file import best_file, read_model

        best = read_model(folder := find_run(self.folder)).get("best")
        return None if best is None else best | {"weights": f"{self.folder}/{best_file(folder)}"}

    def evaluate(self, **options: Any) -> dict[str, Any]:
        """Evaluate the model as `raydali evaluate` does, with its options; return the content of evaluation.json."""
        return self._command("evaluate", options)

    def predict(self, data: str, output: str, **options: Any) -> str:
        """Write what the model says of other samples, as `raydali predict` does; return the path of the output."""
        _finish([*_CLI, "predict", self.folder, data, *_arguments({"output": output} | options)])
        return output

    def export(self, **options: Any) -> dict[str, Any]:
        """Export the model as `raydali export` does, with its options; return the content of its --json file."""
        return self._command("export", options)

    def _command(self, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        with TemporaryDirectory() as folder:
            file = Path(folder, "result.json")
            _finish([*_CLI, name, self.folder, *_arguments({**options, "json": str(file)})])
            result: dict[str, Any] = json.loads(file.read_text())
        return result

    def _history(self) -> "History":
        from raydali.report.html.history import History
        from raydali.run.find import find_run

        return History.read(find_run(self.folder))

    def _repr_html_(self) -> str:
        """Return the report with its curves, which Jupyter shows."""
        from raydali.report.html.page import run_page

        page = html.escape(run_page(self._history()).decode())
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


_CLI = [sys.executable, "-m", "raydali.cli"]


def _row(epoch: "Epoch") -> dict[str, Any]:
    return {**epoch.values, "epoch": epoch.number, "verdict": epoch.verdict}


def _arguments(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the command line of these options."""
    for name, value in options.items():
        option = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            yield f"--{option}" if value else f"--no-{option}"
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from (f"--{option}", *map(str, value))
        else:
            yield f"--{option}={value}"


def _finish(command: Sequence[str]) -> None:
    with _called(command, CommandError, {}) as lines:
        for line in lines:
            print(line, end="", flush=True)


@contextmanager
def _called(
    command: Sequence[str], failure: type[RaydaliError], environment: Mapping[str, str]
) -> Iterator[Iterator[str]]:
    """Run a command of raydali, and yield its lines; then raise the error that its exit code stands for."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,  # see ENDS_WITH_INPUT
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    assert process.stdout is not None
    last = deque[str](maxlen=_LAST)

    def lines(output: Iterator[str]) -> Iterator[str]:
        for line in output:
            if line.startswith(_ERROR):
                last.clear()
            last.append(line)
            yield line

    with process:
        try:
            yield lines(process.stdout)
            process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            for _ in process.stdout:  # it does not end before somebody has read what it writes
                pass
            raise
    message = "".join(last).removeprefix(_ERROR).strip()
    if process.returncode == 130:
        raise KeyboardInterrupt(last[-1].strip() if last else "interrupted")
    if process.returncode:
        raise (UsageError if process.returncode == 2 else failure)(message or f"it ended with {process.returncode}")
