"""What of a job's file can be sent to workers."""

from types import SimpleNamespace
from typing import Any

import torch
from ray import cloudpickle

from raydali.launch.driver.worker_group import pickle_modules_of_torch
from tests.support.ranks import run_ranks


def shape_of_a_job() -> tuple[int, ...]:
    """What a copy returns of a function of the main module, as a job's, whose global is torch."""
    main: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec("def train(config): return torch.zeros(config.classes, config.ops).shape", main)
    pickle_modules_of_torch()
    copy = cloudpickle.loads(cloudpickle.dumps(main["train"]))
    return tuple(copy(SimpleNamespace(classes=2, ops=3)))


def test_a_job_may_import_torch_and_have_an_option_classes() -> None:
    assert run_ranks(1, shape_of_a_job) == [(2, 3)]
