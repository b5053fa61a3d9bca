"""This file has the options that commands on trained runs share."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from raydali.options.placement import AT_LEAST_1, PlacementOptions

WAIT_POLICY = "OMP_WAIT_POLICY", "passive"
"""The environment variable that lets PyTorch's threads sleep while they wait, and its value. By default, a thread of
OpenMP keeps its core busy until the others are done; where a loader or another process needs that core, all wait for
each other. It must be set before PyTorch is imported."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions(PlacementOptions):
    """A run, and where its model runs."""

    run: tyro.conf.Positional[str]
    """Folder of the run, such as ~/raydali-runs/pets or s3://bucket/runs/pets."""
    checkpoint: Literal["best", "newest"] = "best"
    """Weights with the best validation score, or of the newest checkpoint."""
    job: str | None = None
    """Name or file of the run's job. Default: the one that the run names, in this folder if it is yours."""
    unchecked: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Go on although the job's network does not compute what the run computed. The result says so."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Floats of the forward pass. Default: as in the run. CPUs without bf16 compute in fp32."""
    batch_size: Annotated[int | None, AT_LEAST_1] = None
    """Samples that a device processes at once. Default: as in the run."""
    workers: str | None = None
    """Number of workers. Default: one per GPU; on CPUs one, or 2 on a cluster."""
    loader: Literal["dali", "torch"] | None = None
    """Loader: dali, or torch (PyTorch's DataLoader). Default: dali if it is installed, else torch."""
