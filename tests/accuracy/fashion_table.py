"""What each part of the recipe for Fashion-MNIST brings, with a small network in a few epochs.

    python -m tests.accuracy.fashion_table --data DIR --folder runs --seeds 3 -- --compile

Each row leaves out, changes or adds one thing; see side_by_side.py for what is printed, and for what follows `--`. The
last 10,000 images of the training set validate, so that a choice can follow from the table.
"""

import argparse
from pathlib import Path

from tests.accuracy.side_by_side import side_by_side

BASE = (
    *("--recipe", "fashion", "--model", "resnet9", "--batch-size", "512"),
    *("--global-batch-size", "512", "--warmup-epochs", "2", "--ema-decay", "0.99", "--augment", "shift:4"),
    *("--optimizer", "sgd", "--learning-rate", "0.8", "--weight-decay", "5e-4"),
)
HOLD_OUT = 10_000
ADAMW = ("--learning-rate", "0.004", "--weight-decay", "0.05")
CHANGES: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "no shift, no flip, no erasing": ("--augment", "none", "--flip-probability", "0", "--erase", "0"),
    "no erasing": ("--erase", "0"),
    "half of the erasing": ("--erase", "0.25"),
    "TrivialAugment in place of shifts": ("--augment", "trivial"),
    "no flips in validation": ("--tta", "none"),
    "no moving average": ("--ema-decay", "0", "--no-ema-warmup"),
    "no label smoothing": ("--label-smoothing", "0"),
    "MixUp 0.2": ("--mixup", "0.2"),
    "CutMix 1.0": ("--cutmix", "1.0"),
    "20 pixels in the first half": ("--image-size", "20:28@{half}"),
    "AdamW": ("--optimizer", "adamw", *ADAMW),
    "Muon": ("--optimizer", "muon", *ADAMW),
}


def main() -> None:
    """Read the arguments, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with Fashion-MNIST as Parquet")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where the runs are saved")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--epochs", type=int, default=16, help="epochs of each run")
    parser.add_argument("--at-once", type=int, default=9, help="number of processes at a time")
    parser.add_argument("options", nargs="*", help="of jobs/imagenet.py, after --")
    given = parser.parse_args()
    base = *BASE, "--data", given.data, "--epochs", str(given.epochs), *given.options
    half = f"{given.epochs // 2}-{given.epochs // 2 + 1}"
    runs = {name: (*base, *(change.format(half=half) for change in changes)) for name, changes in CHANGES.items()}
    side_by_side(runs, given.folder, seeds=given.seeds, at_once=given.at_once, hold_out=HOLD_OUT)


if __name__ == "__main__":
    main()
