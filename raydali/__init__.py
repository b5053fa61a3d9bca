"""Ray Train jobs for vision models, fed by NVIDIA DALI: each sample exactly once, at the speed of the step.

The public names are listed in __init__.pyi, which type checkers read. Each one is imported when it is first asked for,
so that `import raydali` is quick, with no torch, Ray or DALI.
"""

import logging
import os
import re
import sys
from importlib import import_module
from pathlib import Path

from raydali.old_imports import OldImports

# Triton 3.9 fuses multiplications with additions in raydali's kernels, and warns that Triton 3.10 will not by default.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# Without Triton, which only GPUs need, torch warns in every process that it counts no operations of Triton's kernels.
logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)

_IMPORT = re.compile(r"^from (\S+) import (\w+) as _?(\w+)$", re.MULTILINE)
_HOMES = {
    name: (module, name_there)
    for module, name_there, name in _IMPORT.findall((Path(__file__).parent / "__init__.pyi").read_text())
}
"""By public name, its module and its name there."""
__all__ = sorted(_HOMES)

sys.meta_path.append(OldImports(_HOMES))


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, name_there = _HOMES[name]
    return getattr(import_module(module), name_there)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
