"""The built-in digits as jobs/imagenet.py trains on them in tests, in a few seconds."""

from dataclasses import replace
from functools import cache
from pathlib import Path

from torch import nn
from torchvision.models.resnet import BasicBlock

from jobs.imagenet import DIGITS, Data
from raydali.data.builtin.digits import digits_folder
from raydali.data.index.labeled import LabeledFiles

SHORT = replace(
    DIGITS,
    image_size=16,
    resize_size=16,
    ceiling=False,
    epochs=2,
    batch_size=16,
    global_batch_size=96,
    trace_samples=True,
)
"""Six micro-batches a global batch: 1, 2, 3 and 6 workers share them evenly, 4 and 5 do not. Steps 0..14 close the
first epoch, 15..28 the second."""


@cache
def digits_data(root: Path | None = None) -> Data:
    """Their images; of a copy of their folder, where one is given."""
    return Data(*(LabeledFiles.scan(f"{root or digits_folder()}/{split}") for split in ("train", "val")))


def few_digits(root: Path) -> Data:
    """Every third of them: 479 to train on, five global batches of SHORT; 120 to validate."""
    return digits_data(every_third(digits_folder(), root))


def every_third(folder: str, root: Path) -> Path:
    """Link every third file of the class folders in `train` and `val` below `root`."""
    for split in ("train", "val"):
        for file in sorted(Path(folder, split).glob("*/*"))[::3]:
            link = root / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return root


def residual_digits(num_classes: int) -> nn.Sequential:
    """A small ResNet, as `--model tests.support.digits:residual_digits`."""
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.MaxPool2d(2))
    blocks = [BasicBlock(16, 16) for _ in range(2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes))
