"""What each part of the recipe for Fashion-MNIST brings, with a small network in a few epochs.

    python -m tests.accuracy.fashion_table --data DIR --folder runs --seeds 3

Each row leaves out, changes or adds one thing; see side_by_side.py for what is printed.
"""

import argparse
from pathlib import Path

from tests.accuracy.side_by_side import side_by_side

BASE = (
    *("--recipe", "fashion", "--loader", "resident", "--model", "resnet9", "--batch-size", "512"),
    *("--global-batch-size", "512", "--learning-rate", "0.8", "--warmup-epochs", "2", "--ema-decay", "0.99"),
)
ADAMW = ("--learning-rate", "0.004", "--weight-decay", "0.05")
CHANGES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "no shift, no flip, no erasing": ("--augment", "none", "--flip-probability", "0", "--erase", "0"),
    "no erasing": ("--erase", "0"),
    "TrivialAugment in place of shifts": ("--augment", "trivial"),
    "no flips in validation": ("--tta", "none"),
    "no moving average": ("--ema-decay", "0", "--no-ema-warmup"),
    "no label smoothing": ("--label-smoothing", "0"),
    "20 pixels in the first half": ("--image-size", "20:28@5-6"),
    "AdamW": ("--optimizer", "adamw", *ADAMW),
    "Muon": ("--optimizer", "muon", *ADAMW),
}


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the IDX files")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the runs are saved")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each run")
    parser.add_argument("--at-once", type=int, default=9, help="number of processes at a time")
    given = parser.parse_args()
    base = *BASE, "--data", given.data, "--epochs", str(given.epochs)
    runs = {name: (*base, *changes) for name, changes in CHANGES.items()}
    side_by_side(runs, given.folder, seeds=given.seeds, at_once=given.at_once)


if __name__ == "__main__":
    main()
