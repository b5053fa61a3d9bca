"""Folders of runs with a model, as training leaves them, without training."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from raydali.launch.choices import with_kept
from raydali.launch.driver.starting_weights import model_facts
from raydali.run.folder import CONFIG, RunFolder
from raydali.run.model_file import BestWeights, write_model


def made_run(
    storage: Path,
    job: ModuleType,
    config: Any,
    classes: Sequence[str],
    *,
    name: str = "run",
    first_label: int = 0,
    seed: int = 0,
    **more: Any,
) -> RunFolder:
    """Return the folder of a run of one of raydali's jobs, whose model has random weights.

    Args:
        storage: the folder of runs.
        job: the module of the job.
        config: its options; what is left open is chosen as at a start.
        classes: the names of the classes in order.
        name: of the run.
        first_label: of the first class.
        seed: of the weights.
        more: further settings.
    """
    folder = RunFolder(str(storage), name)
    folder.create()
    config = with_kept(config, {})
    settings = asdict(config) | {"samples": 0, "fingerprint": None, "weights_sha256": None} | more
    folder.write_json(CONFIG, settings)
    assert job.__file__ is not None
    write_model(folder, model_facts(job.__file__, [*zip(classes, count(first_label), strict=False)], settings, None))
    torch.manual_seed(seed)
    model = job.build_model(config, len(classes))
    BestWeights(model.state_dict(), epoch=0, metric="top1", score=0.5).write(folder)
    return folder
