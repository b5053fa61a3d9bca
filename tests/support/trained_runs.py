"""Folders of runs with a model, as training leaves them, without training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from raydali.inference.engine import Inference, PartResult
from raydali.inference.parts import Part
from raydali.launch.driver.starting_weights import model_facts
from raydali.options.defaults import resolve
from raydali.options.placement import PlacementOptions
from raydali.run.folder import CONFIG, FORM, RunFolder
from raydali.run.model_file import BestWeights, write_model


def made_run(
    storage: Path,
    job: ModuleType,
    config: Any,
    classes: Sequence[str],
    *,
    seed: int = 0,
    **of_start: Any,
) -> RunFolder:
    """Return the folder of a run whose model has random weights of a seed; see `started_run` for all else."""
    folder = started_run(storage, job, config, classes, **of_start)
    torch.manual_seed(seed)
    model = job.build_model(config, len(classes))
    BestWeights(model.state_dict(), epoch=0, metric="top1", score=0.5).write(folder)
    return folder


def started_run(
    storage: Path,
    job: ModuleType,
    config: Any,
    classes: Sequence[str],
    *,
    name: str = "run",
    first_label: int = 0,
    **more: Any,
) -> RunFolder:
    """Return the folder of a run of one of raydali's jobs, as the driver leaves it before the first step.

    Args:
        storage: the folder of runs.
        job: the module of the job.
        config: its options; what is left open is chosen as at a start.
        classes: the names of the classes in order.
        name: of the run.
        first_label: of the first class.
        more: further settings.
    """
    folder = RunFolder(str(storage), name)
    folder.create()
    settings = (
        asdict(resolve(config, {})) | {"form": FORM, "samples": 0, "fingerprint": None, "weights_sha256": None} | more
    )
    folder.write_json(CONFIG, settings)
    assert job.__file__ is not None
    write_model(folder, model_facts(job.__file__, [*zip(classes, count(first_label), strict=False)], settings, None))
    return folder


@contextmanager
def dealt_to(workers: int) -> Iterator[None]:
    """Deal the parts of a command to that many workers in this process, the last one first."""

    def results(inference: Inference, parts: Sequence[Part], _: PlacementOptions) -> Iterator[PartResult]:
        for rank in reversed(range(workers)):
            if mine := parts[rank::workers]:
                yield from inference.results(mine, torch.device("cpu"), cpus=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raydali.inference.workers.results", results)
        yield
