"""Whole training scripts of others on one GPU: timm's train.py and torchvision's references, with ResNet-50.

    python -m tests.support.peers.scripts --data ~/imagenet --timm-script train.py --torchvision-script \
        references/classification/train.py

--data is a folder with `train` and `val`. Each script runs for --seconds and is then ended. Its images/s are the median
of the rates that it has printed, without the first half of them.
"""

import argparse
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from raydali.host.cpu_times import usable_cores

RATES = {"timm": r"Time: [\d.]+s, +([\d.]+)/s", "torchvision": r"img/s: ([\d.]+)"}
"""The rates in the lines that the scripts print, of the steps since the line before."""


def command_of(name: str, script: str, data: str, threads: int, batch_size: int) -> list[str]:
    """Return the command of a script, with mixed precision and channels last, as its README trains ResNet-50."""
    common = [sys.executable, script, "--workers", str(threads), "--batch-size", str(batch_size)]
    if name == "timm":
        given = ["--data-dir", data, "--model", "resnet50", "--amp", "--amp-dtype", "bfloat16", "--channels-last"]
        return [*common, *given, "--log-interval", "10", "--epochs", "100"]
    return [*common, "--data-path", data, "--model", "resnet50", "--amp", "--print-freq", "1", "--epochs", "100"]


def rates(name: str, output: str) -> list[float]:
    """Parse the images/s that a script has printed."""
    return [float(rate.replace(",", "")) for rate in re.findall(RATES[name], output)]


def measure(name: str, command: list[str], seconds: float, show: Callable[[str], None]) -> float | None:
    """Run a script and return its images/s, or show the end of its output and return None."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, start_new_session=True)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)
            finally:
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
        printed = log.read_text(errors="replace")
    found = rates(name, printed)
    if not found:
        show(f"{name}: no rate in {seconds:g} s; its output ends with:\n{printed[-2000:]}")
        return None
    return statistics.median(found[len(found) // 2 :])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    for name in RATES:
        parser.add_argument(f"--{name}-script", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--batch-size", type=int, default=256)
    options = parser.parse_args()
    failed = 0
    for name in RATES:
        script = getattr(options, f"{name}_script")
        if script is None:
            print(f"{name}: not run, give --{name}-script FILE")
            continue
        data, script = (str(Path(each).expanduser().absolute()) for each in (options.data, script))
        command = command_of(name, script, data, options.threads, options.batch_size)
        rate = measure(name, command, options.seconds, print)
        failed += rate is None
        if rate is not None:
            print(f"{name}: {rate:,.0f} images/s")
    return failed


if __name__ == "__main__":
    sys.exit(main())
