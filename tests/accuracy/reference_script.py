"""torchvision's reference script and raydali train the same recipe on the same data: their accuracies must agree.

    python -m tests.accuracy.reference_script --script VISION/references/classification/train.py --data DIR --seeds 3

DIR has class folders in train/ and val/; --make PARQUET makes them first, of the Parquet files in that folder. The
recipe is ResNet-18 with crops, flips, TrivialAugment, erasing and label smoothing, in fp32. raydali reads the same
files.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from statistics import mean, stdev

from PIL import Image

from raydali.data.index.formats import train_and_val
from tests.accuracy.side_by_side import side_by_side

SIZE, RESIZED, BATCH = 28, 32, 128
SEEDED = "import runpy, sys, torch; torch.manual_seed({seed}); sys.argv = {arguments!r}; sys.path.insert(0, {folder!r})"


def options_of_script(data: str, epochs: int, workers: int) -> list[str]:
    """Return the recipe in the options of torchvision's script."""
    return [
        *("--data-path", data, "--model", "resnet18", "--batch-size", str(BATCH), "--epochs", str(epochs)),
        *("--lr", "0.1", "--momentum", "0.9", "--lr-scheduler", "steplr", "--lr-step-size", str(max(1, epochs // 2))),
        *("--lr-gamma", "0.1", "--weight-decay", "1e-4", "--label-smoothing", "0.1", "--auto-augment", "ta_wide"),
        *("--random-erase", "0.1", "--train-crop-size", str(SIZE), "--val-crop-size", str(SIZE)),
        *("--val-resize-size", str(RESIZED), "--workers", str(workers), "--print-freq", "100000", "--output-dir", ""),
    ]


def options_of_raydali(data: str, epochs: int) -> list[str]:
    """Return the recipe in the options of jobs/imagenet.py."""
    return [
        *("--data", data, "--model", "resnet18", "--batch-size", str(BATCH), "--epochs", str(epochs)),
        *("--learning-rate", "0.1", "--no-nesterov", "--schedule", f"step:{max(1, epochs // 2)},0.1"),
        *("--warmup-epochs", "0", "--weight-decay", "1e-4", "--no-decay", "none", "--label-smoothing", "0.1"),
        *("--augment", "trivial", "--erase", "0.1", "--image-size", str(SIZE), "--resize-size", str(RESIZED)),
        *("--precision", "fp32", "--no-compile"),
    ]


def accuracy_of_script(script: Path, seed: int, options: Sequence[str]) -> float:
    """Run torchvision's script with a seed; return its accuracy after the last epoch, in per cent."""
    arguments = [script.name, *options]
    run = SEEDED.format(seed=seed, arguments=arguments, folder=str(script.parent))
    command = [sys.executable, "-c", f"{run}; runpy.run_path({str(script)!r}, run_name='__main__')"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    found = re.findall(r"Acc@1 ([\d.]+) Acc@5", done.stdout)
    if done.returncode or not found:
        raise SystemExit(f"{script} failed: {done.stderr[-1000:]}")
    return float(found[-1])


def make_folders(of: str, root: Path) -> None:
    """Write the images of Parquet files as PNG class folders, train/ and val/."""
    for split, source in zip(("train", "val"), train_and_val(of), strict=True):
        for id, label in enumerate(source.labels.tolist()):
            path = root / split / source.classes[label] / f"{id:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.open(BytesIO(source.read(id))).save(path)


def main() -> None:
    """Read the arguments, train with both, and print the accuracies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, required=True, help="train.py of torchvision's references")
    parser.add_argument("--data", required=True, help="class folders, train/ and val/")
    parser.add_argument("--make", help="folder of Parquet files, of which --data is made first")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where raydali's runs are saved")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, all at once")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each run")
    parser.add_argument("--device", default="cuda", help="device of torchvision's script: cuda or cpu")
    given = parser.parse_args()
    if given.make and not Path(given.data).exists():
        make_folders(given.make, Path(given.data))
    began, workers = time.perf_counter(), max(1, (os.cpu_count() or 1) // given.seeds)
    options = [*options_of_script(given.data, given.epochs, workers), "--device", given.device]
    with ThreadPoolExecutor(given.seeds) as threads:
        found = [*threads.map(lambda seed: accuracy_of_script(given.script, seed, options), range(given.seeds))]
    deviation = f" +- {stdev(found):.2f}" if len(found) > 1 else ""
    accuracies = ", ".join(f"{each:.2f}" for each in found)
    took = f"{time.perf_counter() - began:.0f} s, starts included"
    print(f"torchvision's script: top-1 {mean(found):.2f}{deviation} % ({accuracies}); {took}", flush=True)
    runs = {"raydali": options_of_raydali(given.data, given.epochs)}
    side_by_side(runs, given.folder, seeds=given.seeds, at_once=given.seeds)


if __name__ == "__main__":
    main()
