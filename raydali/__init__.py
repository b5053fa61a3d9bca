"""Ray Train jobs for vision models, fed by NVIDIA DALI: each sample exactly once, at the speed of the step.

For training loops of your own these ten names are all there is; see docs/own-loop.md. Each is imported when it is first
asked for, so that `import raydali` is quick, with no torch, Ray or DALI.
"""

import logging
import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raydali.data.index.formats import labeled_images
    from raydali.data.load.make import make_loader
    from raydali.data.stream.stream import OrderedPass, Stream
    from raydali.data.tasks.classification import TrainImages, ValidationImages
    from raydali.errors import DataError, UsageError
    from raydali.own_loop import measured
    from raydali.training.models.normalized import Normalized

# Triton 3.9 fuses multiplications with additions in raydali's kernels, and warns that Triton 3.10 will not by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# Without Triton, which only GPUs need, torch warns in every process that it counts no operations of Triton's kernels.
logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)

__all__ = [
    "DataError",
    "Normalized",
    "OrderedPass",
    "Stream",
    "TrainImages",
    "UsageError",
    "ValidationImages",
    "labeled_images",
    "make_loader",
    "measured",
]

_HOME = {
    "DataError": "errors",
    "Normalized": "training.models.normalized",
    "OrderedPass": "data.stream.stream",
    "Stream": "data.stream.stream",
    "TrainImages": "data.tasks.classification",
    "UsageError": "errors",
    "ValidationImages": "data.tasks.classification",
    "labeled_images": "data.index.formats",
    "make_loader": "data.load.make",
    "measured": "own_loop",
}
"""The module of each name."""

if not TYPE_CHECKING:  # a type checker knows the names above, and that there are no others

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
