"""Whole training scripts of others on one GPU: timm's train.py and torchvision's references, with ResNet-50.

    python -m tests.support.peers.scripts --data ~/imagenet --timm-script train.py --torchvision-script \
        references/classification/train.py

--data is a folder with `train` and `val`. Each script runs for --seconds and is then ended. The images/s are those of
the second half of the steps whose times it has printed. The rates that torchvision's script prints itself leave out
the time in which a step waits for its batch.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raydali.host.cpu_times import usable_cores

TIMES = {"timm": r"Train: .* Time: ([\d.]+)s", "torchvision": r"^Epoch: .* time: ([\d.]+)"}
"""The seconds in the lines of training steps: of a step, or torchvision's mean of the last twenty steps."""


def command_of(name: str, script: str, data: str, threads: int, batch_size: int, device: str) -> list[str]:
    """Return the command of a script, as its README trains ResNet-50: on a GPU in mixed precision."""
    common = [sys.executable, script, "--workers", str(threads), "--batch-size", str(batch_size)]
    common += ["--device", device, "--model", "resnet50", "--epochs", "100"]
    common += ["--amp"] if device != "cpu" else []
    if name == "timm":
        return [*common, "--data-dir", data, "--amp-dtype", "bfloat16", "--channels-last", "--log-interval", "1"]
    return [*common, "--data-path", data, "--print-freq", "1"]


def times(name: str, output: str) -> list[float]:
    """Parse the seconds per step that a script has printed."""
    return [float(found) for found in re.findall(TIMES[name], output, re.MULTILINE)]


def step_seconds(name: str, command: list[str], seconds: float, show: Callable[[str], None]) -> float | None:
    """Run a script and return the mean time of a step, or show the end of its output and return None."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        environment = os.environ | {"PYTHONUNBUFFERED": "1"}  # no line is lost when the process is killed
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
            finally:
                end(process)
        printed = log.read_text(errors="replace")
    found = times(name, printed)
    if not found:
        show(f"{name}: no step in {seconds:g} s; its output ends with:\n{printed[-2000:]}")
        return None
    return statistics.mean(found[len(found) // 2 :])


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group, the workers of its loader."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    for name in TIMES:
        parser.add_argument(f"--{name}-script", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    failed = 0
    for name in TIMES:
        script = getattr(options, f"{name}_script")
        if script is None:
            print(f"{name}: not run, give --{name}-script FILE")
            continue
        data, script = (str(Path(each).expanduser().absolute()) for each in (options.data, script))
        command = command_of(name, script, data, options.threads, options.batch_size, options.device)
        step = step_seconds(name, command, options.seconds, print)
        failed += step is None
        if step is not None:
            print(f"{name}: {options.batch_size / step:,.4g} images/s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
