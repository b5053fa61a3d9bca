"""The help of a job: the options that most people use, in groups; --help-all shows the others, too."""

from collections.abc import Iterable
from dataclasses import fields, make_dataclass
from itertools import chain
from typing import Any

import tyro

FIRST = {
    "data": ("data", "val_data", "val_fraction", "label_column"),
    "model": ("model", "weights", "image_size"),
    "training": ("recipe", "epochs", "batch_size", "global_batch_size", "optimizer", "learning_rate", "augment"),
    "placement": ("workers", "gpu", "no_gpu", "loader", "precision"),
    "results": ("storage", "name", "checkpoint_every"),
}
"""The options that --help shows of those that jobs share, by group."""


def show_help(config: type, command: str) -> None:
    """Print the first options of a job's dataclass, and those that no class of raydali has; raises SystemExit."""
    bases = (base for base in config.__mro__ if base.__module__.startswith("raydali."))
    shared = {*chain(*FIRST.values()), *(each.name for base in bases for each in fields(base))}
    own = [each.name for each in fields(config) if each.name not in shared]
    groups = [(name, _only(config, names)) for name, names in {**FIRST, "job": own}.items()]
    options = make_dataclass("Options", [group for group in groups if fields(group[1])])
    about = f"{config.__doc__}\n{command} --help-all shows all {len(fields(config))} options."
    style = tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes
    tyro.cli(options, prog=command, description=about, config=style, args=["--help"])


def _only(config: Any, names: Iterable[str]) -> Any:  # noqa: ANN401 (a dataclass)
    """Return a copy of a dataclass with some of its fields, whose descriptions tyro reads in the same source."""
    kept = {name: config.__dataclass_fields__[name] for name in names if name in config.__dataclass_fields__}
    return type(config.__name__, config.__bases__, {**vars(config), "__dataclass_fields__": kept, "__doc__": ""})
