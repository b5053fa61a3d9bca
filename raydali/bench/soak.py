"""`raydali bench soak`: a long run of small data, and whether its processes grow with its epochs.

    raydali bench soak
    raydali bench soak --epochs 1000 --workers 4 --json soak.json

The built-in digits, trained by the job as a user starts it, on a Ray of its own. Behind each epoch the driver, Ray
Train's controller and every rank are looked at from outside (/proc): resident memory, open files, threads; and the
memory in use on the GPUs. What grows is told from the second quarter of the run to the last one, by their medians: the
first quarter fills pools and caches.
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
from pathlib import Path
from statistics import median
from typing import Any

from raydali.bench.common import shared_options
from raydali.errors import CommandFailed, UsageError
from raydali.host.started_jobs import heed_sigterm, job_script
from raydali.output import JsonFile, machine, require_writable, show, write_json

LEAST_READINGS = 8
LEAST_EPOCHS = LEAST_READINGS + 1
"""Behind the last epoch nothing is read: processes are about to end."""
MAX_WORKERS = 64
POLL_SECONDS = 0.05
ROLES = {"RayTrainWorker": "rank", "TrainController": "controller"}
"""By what is in a process's title."""


@dataclass(frozen=True)
class Limit:
    """How much a figure may grow from the second quarter of a run to the last.

    Attributes:
        an_epoch: for each epoch between them.
        always: in any case: what a figure goes up and down by.
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
class SoakBench:
    """A long run of small data: whether memory, open files and threads stay flat. Exit code 1: they grow."""

    epochs: int = 200
    """Of the run."""
    workers: int = 2
    """Ranks."""
    batch_size: int = 32
    """Of each rank."""
    timeout: float = 3600.0
    """Seconds for the run."""
    json: JsonFile = None


def main(options: SoakBench) -> dict[str, Any]:
    """Train, look, show, write.

    Returns:
        What --json writes: {"command", "machine", "settings", "seconds", "rows"}. A row: {"process", "figure", "unit",
        "epochs": those behind which it was read, "values": of each, "growth": in all, "growth_an_epoch", "allowed"}.

    Raises:
        UsageError: an option that cannot be met; before anything is started.
        CommandFailed: the run failed, or something grew beyond its limit; the latter after all was shown and written.
    """
    if options.epochs < LEAST_EPOCHS:
        raise UsageError(f"--epochs must be at least {LEAST_EPOCHS}, not {options.epochs}")
    if not 1 <= options.workers <= MAX_WORKERS:
        raise UsageError(f"--workers must be from 1 to {MAX_WORKERS}, not {options.workers}")
    shared_options.check_positive(options, ["batch_size"])
    require_writable("--json", options.json)
    script = job_script("imagenet.py", "raydali bench soak")
    heed_sigterm()
    began = time.monotonic()
    readings = _train(options, script)
    rows = [
        judged(process, figure, epochs, values)
        for (process, figure), (epochs, values) in sorted(series(readings).items())
    ]
    result = {
        "command": "bench soak",
        "machine": machine(),
        "settings": asdict(options),
        "seconds": round(time.monotonic() - began, 1),
        "rows": rows,
    }
    _show(result)
    if options.json:
        write_json(result, options.json)
    if grown := [row for row in rows if row["growth"] > row["allowed"]]:
        raise CommandFailed(
            "; ".join(
                f"{row['figure']} of {row['process']} grew by {row['growth']:.1f} {row['unit']}".rstrip()
                + f", {row['allowed']:.1f} are allowed"
                for row in grown
            )
        )
    return result


Reading = dict[tuple[str, str], float]
"""Figures of a moment by (process, figure)."""


def series(readings: Sequence[tuple[int, Reading]]) -> dict[tuple[str, str], tuple[list[int], list[float]]]:
    """Epochs and values of each figure, of readings behind epochs; processes that were not there all the time apart.

    Raises:
        CommandFailed: too few readings for quarters.
    """
    if len(readings) < LEAST_READINGS:
        raise CommandFailed(
            f"{len(readings)} epochs were read, of {LEAST_READINGS} at least: the others came too fast; "
            f"raise --epochs, or lower --batch-size, for longer ones"
        )
    names = set.intersection(*(set(reading) for _, reading in readings))
    return {name: ([epoch for epoch, _ in readings], [reading[name] for _, reading in readings]) for name in names}


def judged(process: str, figure: str, epochs: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    """A row of the result: how much a figure grew, and how much it might have."""
    quarter, limit = len(values) // 4, LIMITS[figure]
    second, last = slice(quarter, 2 * quarter), slice(len(values) - quarter, None)
    between = median(epochs[last]) - median(epochs[second])
    return {
        "process": process,
        "figure": figure,
        "unit": limit.unit,
        "epochs": list(epochs),
        "values": list(values),
        "growth": median(values[last]) - median(values[second]),
        "growth_an_epoch": (median(values[last]) - median(values[second])) / between,
        "allowed": max(limit.always, limit.an_epoch * between),
    }


def _train(options: SoakBench, script: Path) -> list[tuple[int, Reading]]:
    """The figures behind each epoch but the last."""
    from raydali.host import processes
    from raydali.run.folder import EPOCHS, RunFolder

    mark = uuid.uuid4().hex
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    readings: list[tuple[int, Reading]] = []
    with tempfile.TemporaryDirectory(prefix="raydali-soak-") as storage:
        folder, log = RunFolder(storage, "soak"), Path(storage, "log")
        command = [sys.executable, str(script), "--storage", storage, "--name", "soak", "--trace-samples"]
        command += ["--epochs", str(options.epochs), "--workers", str(options.workers)]
        command += ["--batch-size", str(options.batch_size), "--checkpoint-every", "10", "--no-ceiling"]
        with log.open("wb") as output:
            driver = subprocess.Popen(
                command,
                cwd=script.parents[1],
                env=inherited | {processes.MARK: mark},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            deadline, rows = time.monotonic() + options.timeout, Path(folder.path(EPOCHS))
            while driver.poll() is None and time.monotonic() < deadline:
                done = rows.read_bytes().count(b"\n") if rows.exists() else 0
                if (readings[-1][0] if readings else 0) < done < options.epochs and driver.poll() is None:
                    titles = [(each.pid, each.command) for each in processes.members(mark)]
                    readings.append((done, _reading(driver.pid, titles)))
                    print(f"epoch {done} of {options.epochs}", end="\r", file=sys.stderr, flush=True)
                time.sleep(POLL_SECONDS)
            print(file=sys.stderr)
            if driver.poll() != 0:
                what = f"ended with {driver.poll()}" if driver.poll() is not None else "is not done in time"
                end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
                raise CommandFailed(f"the run {what}: raise --timeout, or see:\n{end}")
        finally:
            processes.end(mark)
            driver.wait()
    return readings


def _reading(driver: int, titles: Sequence[tuple[int, str]]) -> Reading:
    found: Reading = {}
    named = [("driver", driver)]
    for part, role in ROLES.items():
        pids = sorted(pid for pid, title in titles if part in title)
        named += [(f"{role} {i}" if role == "rank" else role, pid) for i, pid in enumerate(pids)]
    for name, pid in named:
        with suppress(OSError):  # it has just ended
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            figures = {
                "memory": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                "files": len(os.listdir(f"/proc/{pid}/fd")),
                "threads": len(os.listdir(f"/proc/{pid}/task")),
            }
            found |= {(name, figure): value for figure, value in figures.items()}
    if (used := _gpu_megabytes()) is not None:
        found["all GPUs", "gpu memory"] = used
    return found


def _gpu_megabytes() -> float | None:
    """In use on all GPUs together, by whomever; None without any, or where the driver's tool is missing."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with suppress(OSError, ValueError, subprocess.CalledProcessError):
        return sum(map(float, subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()))
    return None


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
