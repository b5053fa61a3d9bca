"""Which error a failed run ends with: the worker's own, not its echoes."""

from pathlib import Path
from typing import Any

import pytest

from raydali.data.read.reading import with_retry
from raydali.errors import TrainingError, UsageError
from raydali.launch.driver.endings import driver_error, final_error, resume_hint
from raydali.run.messages import WorkerError
from tests.support.checkpoint_stores import save
from tests.support.messages import mentions
from tests.support.ranks import folder_of


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


def test_an_unexpected_error_names_the_last_place_in_the_package(tmp_path: Path) -> None:
    """Other packages may lie below a folder of the same name, as in a clone with its environment."""
    library: dict[str, Any] = {}
    exec(
        compile("def fail(): raise KeyError('x')", str(tmp_path / "raydali" / ".venv" / "library.py"), "exec"), library
    )
    with pytest.raises(KeyError) as raised:
        with_retry(library["fail"], "a storage")
    assert "reading.py:" in str(driver_error(raised.value, folder_of(tmp_path, "pets")))
