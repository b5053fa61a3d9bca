"""Trainings of jobs/imagenet.py side by side on the GPUs of this machine, without Ray, which gives a GPU to one worker.

    python -m tests.accuracy.side_by_side --seeds 5 --folder runs -- --data DIR --recipe fashion --compile

What follows `--` are options of jobs/imagenet.py. Each seed is a process, on GPU number seed modulo their number, or on
CPUs. It prints the accuracies after the last epoch with their mean and deviation, and the seconds of training: those of
the epochs without validation, from the first step to the last. The same command again resumes what was interrupted.

To choose options, validate on images of the training set with --hold-out, never on the test set.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

RESULT = "result.json"


def side_by_side(
    runs: Mapping[str, Sequence[str]], folder: Path, *, seeds: int, at_once: int, hold_out: int = 0
) -> None:
    """Train all runs with all seeds, some at once, and print a line for each run.

    Args:
        runs: options of jobs/imagenet.py, by the name of the run.
        folder: where the runs are saved.
        seeds: number of seeds, from 0 on.
        at_once: number of processes at a time, which share the CPU cores.
        hold_out: number of training images, the last ones, that validate in place of the validation set.
    """
    cpus = max(1, (os.cpu_count() or 1) // at_once)

    def result(name: str, seed: int) -> dict[str, Any] | None:
        where = folder / f"{name}-{seed}"
        where.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.accuracy.side_by_side", "--only", str(seed), "--cpus", str(cpus)]
        command += ["--hold-out", str(hold_out)]
        with (where / "log.txt").open("a") as log:
            done = subprocess.run([*command, "--folder", where, "--", *runs[name]], stdout=log, stderr=log, check=False)
        if done.returncode:
            print(f"{where} failed: {(where / 'log.txt').read_text()[-500:]}", flush=True)
            return None
        found: dict[str, Any] = json.loads((where / RESULT).read_text())
        return found

    with ThreadPoolExecutor(at_once) as threads:
        waiting = {name: [threads.submit(result, name, seed) for seed in range(seeds)] for name in runs}
        for name, results in waiting.items():
            print(f"{name}: {summary([each for each in (one.result() for one in results) if each])}", flush=True)


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Describe the results of several seeds in a line."""
    if not results:
        return "no result"
    top1 = [100 * each["top1"] for each in results]
    deviation = f" +- {stdev(top1):.2f}" if len(top1) > 1 else ""
    accuracies = ", ".join(f"{each:.2f}" for each in top1)
    seconds = ", ".join(f"{each['seconds']:.1f}" for each in results)
    epoch = mean(each["last_epoch_seconds"] for each in results)
    waited = mean(each["loader_wait_seconds"] / each["seconds"] for each in results)
    return (
        f"top-1 {mean(top1):.2f}{deviation} % ({accuracies}); {seconds} s of training, {epoch:.2f} s the last epoch, "
        f"{waited:.0%} of it waiting for the loader"
    )


def train_here(seed: int, folder: Path, *, cpus: int, options: Sequence[str], hold_out: int = 0) -> None:
    """Train one seed in this process, or resume it, and write its result."""
    import torch

    from jobs.imagenet import DIGITS, FINE_TUNING, Config, Data, train
    from raydali.data.builtin.digits import digits_folder
    from raydali.data.index.formats import train_and_val
    from raydali.launch.driver.command import parse
    from raydali.launch.worker.run_worker import resolve_on_hardware
    from raydali.options.defaults import resolve
    from raydali.run.folder import CONFIG, EPOCHS
    from tests.support.ranks import LocalSession, folder_of

    sys.argv[1:] = [*options, "--seed", str(seed), "--no-ceiling"]
    given = parse(Config, demo=DIGITS, fine_tuning=FINE_TUNING)
    config = resolve(given, {"global_batch_size": given.batch_size})
    data = Data(*train_and_val(config.data or digits_folder(), **config.reading))
    if hold_out:
        first = len(data.train) - hold_out
        data = Data(data.train.drop(range(first, len(data.train))), data.train.drop(range(first)))
    torch.set_num_threads(1)
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", seed % gpus) if gpus else torch.device("cpu")
    run = folder_of(folder)
    session = LocalSession(run, device=device, cpus=cpus, waits_for_saves=False)
    if not Path(run.path(CONFIG)).exists():
        run.write_json(CONFIG, {})
    train(resolve_on_hardware(config, session, samples=len(data.train)), data, session)
    session.checkpoints.finish()
    rows = run.rows(EPOCHS)
    result = {
        "top1": rows[-1]["validation"]["top1"],
        "seconds": sum(row["seconds"] for row in rows),
        "last_epoch_seconds": rows[-1]["seconds"],
        "loader_wait_seconds": sum(row["loader_wait_seconds"] for row in rows),
    }
    (folder / RESULT).write_text(json.dumps(result))


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, each in a process")
    parser.add_argument("--only", type=int, help="train this seed in this process")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the runs are saved")
    parser.add_argument("--at-once", type=int, help="number of processes at a time; default: all seeds")
    parser.add_argument("--cpus", type=int, default=1, help="with --only: CPU cores of the process")
    parser.add_argument("--hold-out", type=int, default=0, help="number of training images that validate")
    parser.add_argument("options", nargs="*", help="of jobs/imagenet.py, after --")
    given = parser.parse_args()
    if given.only is None:
        at_once = given.at_once or given.seeds
        runs = {"run": given.options}
        side_by_side(runs, given.folder, seeds=given.seeds, at_once=at_once, hold_out=given.hold_out)
    else:
        train_here(given.only, given.folder, cpus=given.cpus, options=given.options, hold_out=given.hold_out)


if __name__ == "__main__":
    main()
