"""This file has the options that commands on trained runs share."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from raydali.options.every_job import LaunchOptions

WAIT_POLICY = "OMP_WAIT_POLICY", "passive"
"""The environment variable that lets PyTorch's threads sleep while they wait, and its value. By default, a thread of
OpenMP keeps its core busy until the others are done; where a loader or another process needs that core, all wait for
each other. It must be set before PyTorch is imported."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
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
    batch_size: int | None = None
    """Samples that a device processes at once. Default: as in the run."""
    workers: str | None = None
    """Number of workers. Default: one per GPU; on CPUs one, or 2 on a cluster."""
    cpus_per_worker: int | None = None
    """CPU cores per worker. Default: the cores per GPU of a node, or an equal share of the cores."""
    gpu: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Require GPUs. Default: use GPUs if there are any, else CPUs."""
    no_gpu: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Use CPUs, even if there are GPUs."""
    loader: Literal["dali", "torch"] | None = None
    """Loader: dali, or torch (PyTorch's DataLoader). Default: dali if it is installed, else torch."""

    @property
    def launch(self) -> "LaunchOptions":
        """The options that decide where the model runs.

        Raises:
            UsageError: they cannot be used.
        """
        from raydali.options.every_job import LaunchOptions, require

        require(self, "batch_size", least=1)
        return LaunchOptions(
            workers=self.workers, cpus_per_worker=self.cpus_per_worker, gpu=self.gpu, no_gpu=self.no_gpu
        )
