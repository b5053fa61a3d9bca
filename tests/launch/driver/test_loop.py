"""Which error a failed run ends with: the worker's own, not its echoes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import cloudpickle

from raydali.errors import TrainingError, UsageError
from raydali.launch.driver.loop import final_error, health_check_seconds, pickle_modules_of_torch, resume_hint
from raydali.run.messages import WorkerError
from tests.support.checkpoint_stores import save
from tests.support.messages import mentions
from tests.support.ranks import folder_of, run_ranks


def error_of(rank: int, error: str, **facts: Any) -> WorkerError:
    return WorkerError(rank=rank, group="", step=0, node_id="", error=error, **facts)


def test_the_first_worker_s_error_with_its_traceback_comes_last() -> None:
    trace = '  File "job.py", line 3, in train\n    raise ValueError("no")\n'
    errors = [error_of(2, "ValueError: no", traceback=trace), error_of(0, "RuntimeError: connection closed by peer")]
    error = final_error(errors, "worker group failed", "it recurs")
    assert type(error) is TrainingError
    assert str(error) == f"{trace}rank 2: ValueError: no (it recurs)"


def test_bad_usage_that_a_worker_found_is_bad_usage() -> None:
    errors = [error_of(1, "seed 1, not 0", usage=True, traceback="somewhere\n")]
    error = final_error(errors, "worker group failed", "it recurs")
    assert type(error) is UsageError
    assert str(error) == "seed 1, not 0"


def test_bad_usage_behind_another_error_is_only_its_echo() -> None:
    errors = [error_of(0, "ValueError: no"), error_of(1, "4 workers are too many", usage=True)]
    assert type(final_error(errors, "", "it recurs")) is TrainingError


def test_the_reason_for_ending_follows_the_error() -> None:
    assert str(final_error([error_of(1, "Error")], "", "twice")) == "rank 1: Error (twice)"
    assert str(final_error([error_of(1, "no file", final=True)], "", "it recurs")) == "rank 1: no file"
    assert str(final_error([], "killed", "--max-failures 0")) == "killed (--max-failures 0)"


def test_an_interrupted_run_says_whether_anything_was_saved(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "pets")
    folder.write("checkpoint_000000003/state.pt", b"without a manifest")
    assert mentions(resume_hint(folder), "before first checkpoint nothing saved")
    save(folder, 3)
    assert "--name pets" in resume_hint(folder)


@pytest.mark.parametrize(("workers", "seconds"), [(1, 0.25), (100, 0.25), (1000, 2.5)])
def test_the_controller_asks_no_more_than_400_workers_a_second(workers: int, seconds: float) -> None:
    assert health_check_seconds(workers) == seconds


def shape_of_a_job() -> tuple[int, ...]:
    """What a copy returns of a function of the main module, as a job's, whose global is torch."""
    main: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec("def train(config): return torch.zeros(config.classes, config.ops).shape", main)
    pickle_modules_of_torch()
    copy = cloudpickle.loads(cloudpickle.dumps(main["train"]))
    return tuple(copy(SimpleNamespace(classes=2, ops=3)))


def test_a_job_may_import_torch_and_have_an_option_classes() -> None:
    assert run_ranks(1, shape_of_a_job) == [(2, 3)]
