"""A worker group: what its driver says of its start, and what of a job's file can be sent to its workers."""

from types import SimpleNamespace
from typing import Any

import torch
from ray import cloudpickle

from raydali.launch.driver.hang_detection import HangWatch
from raydali.launch.driver.worker_group import START_LINE_SECONDS, WorkerGroup, pickle_modules_of_torch
from raydali.run.messages import Heartbeat
from tests.support.messages import mentions
from tests.support.ranks import run_ranks


def shape_of_a_job() -> tuple[int, ...]:
    """What a copy returns of a function of the main module, as a job's, whose global is torch."""
    main: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec("def train(config): return torch.zeros(config.classes, config.ops).shape", main)
    pickle_modules_of_torch()
    copy = cloudpickle.loads(cloudpickle.dumps(main["train"]))
    return tuple(copy(SimpleNamespace(classes=2, ops=3)))


def test_a_start_has_a_line_at_intervals() -> None:
    end: Any = None
    group = WorkerGroup(number="1", workers=2, end=end, watch=HangWatch(2, 0, 0))
    late = group.began + START_LINE_SECONDS
    assert not group.start_line(late)  # it waits for its places, which has lines of its own
    group.is_placed = True
    assert not group.start_line(late - 1)
    assert mentions(group.start_line(late), "25 s 0 of 2 load average")
    facts: dict[str, Any] = {"started": 1, "count": 0, "progress": 0.0, "stack": None, "waits": False}
    address: dict[str, Any] = {"group": "1", "node": "n", "node_id": "nn", "pid": 7}
    group.take(Heartbeat(rank=1, doing="building the model; load average 9", **address, **facts))
    assert not group.start_line(late + 20)
    assert mentions(group.start_line(late + 25), "50 s 1 of 2 rank 1 building the model load average 9")
    group.is_training = True
    assert not group.start_line(late + 100)


def test_a_job_may_import_torch_and_have_an_option_classes() -> None:
    assert run_ranks(1, shape_of_a_job) == [(2, 3)]
