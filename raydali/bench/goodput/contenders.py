"""The run of a contender of `raydali bench goodput` on a Ray cluster of its own, with its kills."""

import json
import signal
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

from raydali.bench.common.processes import MeasurementError
from raydali.bench.goodput.metrics import Measured, kill_times, missing_ranks
from raydali.bench.goodput.options import GoodputOptions
from raydali.bench.goodput.recording import FOLDER, finished_steps, newest_step
from raydali.commands.chaos.accounting import lost_and_repeated
from raydali.commands.chaos.nodes import Nodes
from raydali.commands.chaos.run import WatchedRun
from raydali.commands.chaos.samples import due_and_trained
from raydali.commands.chaos.virtual_hosts import LOCAL, Host
from raydali.commands.local_cluster.head import Ports
from raydali.data.sources.builtin.digits import digits_folder
from raydali.errors import CommandError
from raydali.host.processes import send
from raydali.launch.driver.job_file import find_job
from raydali.run.folder import RunFolder

POLL_SECONDS = 0.1
END_SECONDS = 120.0
"""Limit from the last step to the end of raydali's run."""
VALIDATED = 32
"""Number of validation samples at the end of raydali's run."""


RAYDALI = {"undisturbed": (), "raydali-restart": ("--no-replace",), "raydali-in-place": ("--replace",)}
"""The options of raydali's contenders."""
OTHERS = ("ray", "torchft")


def measure(name: str, options: GoodputOptions) -> Measured:
    """Run a contender on a cluster of its own, kill its workers until the last step or the timeout, and end all.

    Raises:
        MeasurementError: it failed, or did not finish its first step in time.
    """
    with tempfile.TemporaryDirectory(prefix="raydali-goodput-", dir="/tmp") as temporary:
        folder = Path(temporary)
        rows = folder / "steps"
        rows.mkdir()
        nodes = Nodes(
            [Host("all", LOCAL)],
            ports=Ports.checked(0, 0, 0),
            folder=folder,
            temp_dir=folder / "ray",
            cpus=options.workers,
            settings={FOLDER: str(rows)},
        )
        run = WatchedRun(
            _command(name, folder, options),
            RunFolder(temporary, "run"),
            folder / "log",
            cwd=folder,
            env={**nodes.env, "RAY_ADDRESS": nodes.address},
        )
        try:
            nodes.start(0)
            run.start()
            kills = _kill_until_done(run, nodes, rows, options, kills=name != "undisturbed")
            end, finished = time.time(), finished_steps(rows)
            done = next((row.time for row in finished if row.step >= options.steps), None)
            if name in RAYDALI:
                if done:
                    run.finish(END_SECONDS)
                lost, repeated = lost_and_repeated(*due_and_trained(run.folder), 0, run.committed())
            else:  # each sample belongs to one step
                lost, repeated = options.batch_size * missing_ranks(finished, options.workers), 0
        except CommandError as error:
            raise MeasurementError(str(error)) from error
        finally:
            run.kill()
            left = nodes.end()
        if left:
            raise MeasurementError(f"processes are left: {', '.join(str(each.pid) for each in left)}")
    return Measured(finished, done or end, kills, lost, repeated)


def _kill_until_done(run: WatchedRun, nodes: Nodes, rows: Path, options: GoodputOptions, *, kills: bool) -> list[float]:
    """Kill workers until the run has finished the last step, or the time has expired; return the kills' times.

    A worker is killed only if it has finished a step. There is no kill while all workers are starting.
    """
    started, found = 0.0, list[float]()
    deadline, schedule = time.monotonic() + options.timeout, kill_times(options.kill_every, options.seed)
    due, number = next(schedule)
    while (step := newest_step(rows)) < options.steps and (not step or time.monotonic() < deadline):
        if (code := run.exit_code()) is not None:
            raise CommandError(f"the driver ended with {code} at step {step}:\n{run.output()[-2000:]}")
        if time.monotonic() > deadline:
            raise CommandError(f"no step is finished after {options.timeout:g} s: raise --timeout")
        if step and not started:
            started = finished_steps(rows)[0].time
        if kills and started and time.time() >= started + due:
            training = [each for each in nodes.all_trainers() if (rows / str(each.pid)).exists()]
            if training:
                found.append(time.time())
                send([training[number % len(training)]], signal.SIGKILL)
            due, number = next(schedule)
        time.sleep(POLL_SECONDS)
    return found


def _command(name: str, folder: Path, options: GoodputOptions) -> list[str]:
    """Return the command line of the contender's driver."""
    listed, validated = _lists(folder, options)
    if name in OTHERS:
        settings = {
            "listed": str(listed),
            "storage": str(folder / "checkpoints"),
            **{each: getattr(options, each) for each in ("workers", "steps", "batch_size", "image_size")},
            "checkpoint_every": options.checkpoint_every,
        }
        return [sys.executable, "-m", "raydali.bench.goodput.ray_loop", name, json.dumps(settings)]
    values = {
        "data": listed,
        "val-data": validated,
        "storage": folder,
        "name": "run",
        "model": "raydali.bench.goodput.recording:model",
        "workers": options.workers,
        "cpus-per-worker": 1,
        "epochs": 1,
        "batch-size": options.batch_size,
        "image-size": options.image_size,
        "checkpoint-every": options.checkpoint_every,
        "learning-rate": 0.1,
        "max-failures": -1,
        "precision": "fp32",
    }
    given = [part for option, value in values.items() for part in (f"--{option}", str(value))]
    flags = ["--trace-samples", "--no-ceiling", "--no-gpu", *RAYDALI[name]]
    return [sys.executable, str(find_job("imagenet")), *given, "--random-area", "0.6", "1", *flags]


def _lists(folder: Path, options: GoodputOptions) -> tuple[Path, Path]:
    """Write lists with lines path,label: the digits repeated for one epoch of all steps, and some for validation."""
    wanted = {"train": options.steps * options.workers * options.batch_size, "val": VALIDATED}
    for split, count in wanted.items():
        images = sorted(Path(digits_folder(), split).glob("*/*.jpg"))
        lines = (f"{image},{image.parent.name}\n" for image in islice(cycle(images), count))
        folder.joinpath(f"{split}.csv").write_text("".join(lines))
    return folder / "train.csv", folder / "val.csv"
