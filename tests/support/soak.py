"""Soak: a long run on small data, to find processes whose memory, files or threads grow.

    python -m tests.support.soak
    python -m tests.support.soak --epochs 1000 --workers 4 --json soak.json

The job trains on the built-in digits, on its own Ray cluster. After each epoch this command reads the resident memory,
open files and threads of the driver, of Ray Train's controller and of every rank, and the memory in use on the GPUs.
Growth is that from the middle of the second quarter of the run to the middle of the last one. The first quarter is
ignored, because it fills pools and caches. The growth of an epoch is the median of that between any two readings
(Theil and Sen's estimator), which a pool that grows once does not change.
"""

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

from raydali.bench.common import check, result_of
from raydali.errors import CommandError, UsageError
from raydali.host.facts import driver_and_gpus
from raydali.host.interrupts import raise_on_signals
from raydali.output import JsonFile, log_tail, parse_options, show, write_json

MIN_READINGS = 8
MIN_EPOCHS = MIN_READINGS + 1
"""Minimum number of epochs. Nothing is read after the last epoch, because processes are about to end."""
MAX_COMPARED = 1000
"""Maximum number of readings of a figure that are compared with each other."""
POLL_SECONDS = 0.05
ROLES = {"RayTrainWorker": "rank", "_ChannelActor": "controller"}
"""Roles of processes, by a part of their titles; Ray names an actor's process after its class."""


@dataclass(frozen=True)
class Limit:
    """The allowed growth of a figure from the second quarter of a run to the last.

    Attributes:
        an_epoch: allowed growth per epoch.
        always: growth that is always allowed, because the figure fluctuates.
    """

    unit: str
    an_epoch: float
    always: float


LIMITS = {
    "memory": Limit("MB", 0.1, 8),
    "files": Limit("", 0, 2),
    "threads": Limit("", 0, 2),
    "gpu memory": Limit("MB", 0.02, 4),
}


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Train many epochs of small data and check that memory, open files and threads stay flat. Exit code 1: no."""

    epochs: int = 200
    """Epochs of the run."""
    workers: int = 2
    """Number of ranks."""
    batch_size: int = 32
    """Images per batch and rank."""
    timeout: float = 3600.0
    """Maximum duration of the run, in seconds."""
    json: JsonFile = None


def main(options: Soak) -> dict[str, Any]:
    """Train, read the processes, show the table and write the file.

    Returns:
        The content of --json: {"command", "machine", "settings", "rows", "seconds"}. A row: {"process", "figure",
        "unit", "epochs": after which it was read, "values": of each, "growth": in total, "growth_an_epoch", "allowed"}.

    Raises:
        UsageError: an option is invalid; before anything is started.
        CommandError: the run failed, or a figure grew beyond its limit; the latter after all was shown and written.
    """
    if options.epochs < MIN_EPOCHS:
        raise UsageError(f"--epochs must be at least {MIN_EPOCHS}, not {options.epochs}")
    check(options)
    raise_on_signals()
    began = time.monotonic()
    figures = sorted(series(_train(options)).items())
    rows = [judged(process, figure, epochs, values) for (process, figure), (epochs, values) in figures]
    result = result_of("soak", asdict(options), rows) | {"seconds": round(time.monotonic() - began, 1)}
    _show(result)
    if options.json:
        write_json(result, options.json)
    if grown := [row for row in rows if row["growth"] > row["allowed"]]:
        raise CommandError(
            "; ".join(
                f"{row['figure']} of {row['process']} grew by {row['growth']:.1f} {row['unit']}".rstrip()
                + f", {row['allowed']:.1f} are allowed"
                for row in grown
            )
        )
    return result


Reading = dict[tuple[str, str], float]
"""Figures at one moment, by (process, figure)."""


def series(readings: Sequence[tuple[int, Reading]]) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
    """Return the epochs and values of each figure; processes that are missing in a reading are left out.

    Raises:
        CommandError: too few readings for quarters.
    """
    if len(readings) < MIN_READINGS:
        raise CommandError(
            f"{len(readings)} epochs were read, of {MIN_READINGS} at least: the others came too fast; "
            f"raise --epochs, or lower --batch-size, for longer ones"
        )
    names = set.intersection(*(set(reading) for _, reading in readings))
    return {name: ([epoch for epoch, _ in readings], [reading[name] for _, reading in readings]) for name in names}


def judged(process: str, figure: str, epochs: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """Return a row of the result: how much a figure grew, and the growth that is allowed."""
    quarter, limit = len(values) // 4, LIMITS[figure]
    between = median(epochs[-quarter:]) - median(epochs[quarter : 2 * quarter])
    read = [*zip(epochs, values, strict=True)][quarter :: ceil(len(values) / MAX_COMPARED)]
    an_epoch = median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(read, 2))
    return {
        "process": process,
        "figure": figure,
        "unit": limit.unit,
        "epochs": list(epochs),
        "values": list(values),
        "growth": an_epoch * between,
        "growth_an_epoch": an_epoch,
        "allowed": max(limit.always, limit.an_epoch * between),
    }


def _train(options: Soak) -> list[tuple[int, Reading]]:
    """Read the figures after each epoch except the last."""
    from raydali.host import cluster_processes
    from raydali.launch.driver.job_file import find_job
    from raydali.run.folder import EPOCHS, RunFolder
    from tests.support.cluster import command_line

    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    readings: list[tuple[int, Reading]] = []
    with tempfile.TemporaryDirectory(prefix="raydali-soak-") as storage:
        folder, log = RunFolder(storage, "soak"), Path(storage, "log")
        command = [sys.executable, str(find_job("imagenet")), "--storage", storage, "--name", "soak", "--trace-samples"]
        command += ["--epochs", str(options.epochs), "--workers", str(options.workers)]
        command += ["--batch-size", str(options.batch_size), "--checkpoint-every", "10", "--no-ceiling"]
        with log.open("wb") as output:
            driver = subprocess.Popen(
                command,
                cwd=storage,
                env=inherited | {cluster_processes.MARK: mark},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            deadline, rows = time.monotonic() + options.timeout, Path(folder.path(EPOCHS))
            while driver.poll() is None and time.monotonic() < deadline:
                done = rows.read_bytes().count(b"\n") if rows.exists() else 0
                if (readings[-1][0] if readings else 0) < done < options.epochs and driver.poll() is None:
                    members = cluster_processes.members(mark)
                    titles = [(each.pid, command_line(each)) for each in members]
                    readings.append((done, _reading(driver.pid, titles)))
                    print(f"finished epoch {done} of {options.epochs}", end="\r", file=sys.stderr, flush=True)
                time.sleep(POLL_SECONDS)
            print(file=sys.stderr)
            if driver.poll() != 0:
                what = f"ended with {driver.poll()}" if driver.poll() is not None else "is not done in time"
                raise CommandError(f"the run {what}: raise --timeout, or see:\n{log_tail(log)}")
        finally:
            cluster_processes.end(mark)
            driver.wait()
    return readings


def _reading(driver: int, titles: Sequence[tuple[int, str]]) -> Reading:
    import psutil

    found: Reading = {}
    named = [("driver", driver)]
    for part, role in ROLES.items():
        pids = sorted(pid for pid, title in titles if part in title)
        named += [(f"{role} {i}" if role == "rank" else role, pid) for i, pid in enumerate(pids)]
    for name, pid in named:
        with suppress(psutil.Error):  # it has just ended
            process = psutil.Process(pid)
            found[name, "memory"] = process.memory_info().rss / 2**20
            found[name, "files"] = process.num_fds()
            found[name, "threads"] = process.num_threads()
    if (used := _gpu_megabytes()) is not None:
        found["all GPUs", "gpu memory"] = used
    return found


def _gpu_megabytes() -> float | None:
    """Return the memory in use on all GPUs together, by all programs; None without a GPU or a driver."""
    _, gpus = driver_and_gpus()
    return sum(gpu.total - gpu.free for gpu in gpus) / 2**20 if gpus else None


def _show(result: dict[str, Any]) -> None:
    lines = []
    for row in result["rows"]:
        form, unit = (".1f", ", MB") if row["unit"] else (".0f", "")
        values = row["values"]
        at = [values[min(len(values) - 1, len(values) * i // 4)] for i in range(5)]
        shown = [f"{value:{form}}" for value in at]
        growth = [f"{row['growth_an_epoch']:+.3f}", f"{row['growth']:+{form}}", f"{row['allowed']:{form}}"]
        lines.append([f"{row['process']}: {row['figure']}{unit}", *shown, *growth])
    columns = ["", "first epoch", "quarter", "half", "three quarters", "last", "growth an epoch", "in all", "allowed"]
    epochs, workers = result["settings"]["epochs"], result["settings"]["workers"]
    show(f"{epochs} epochs of the digits, {workers} workers, {result['seconds']:.0f} s", columns, lines)


if __name__ == "__main__":
    try:
        main(parse_options(Soak, sys.argv[1:], "python -m tests.support.soak"))
    except (UsageError, CommandError) as error:
        sys.exit(f"error: {error}")
