"""A run that an earlier version began: recorded_run/ was made by 058a04e, and killed between two checkpoints.

    python jobs/imagenet.py --epochs 12 --checkpoint-every 30 --trace-samples --name recorded

Its newest checkpoint is of step 60; rows and traces reach up to step 68, as a kill leaves them.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.imagenet import DIGITS
from raydali.run.folder import RunFolder
from tests.support.cluster import environment, run_job
from tests.support.traces import assert_whole

RECORDED = Path(__file__).with_name("recorded_run")


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_to_the_sample(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    folder = RunFolder(str(tmp_path), "recorded")
    shutil.copytree(RECORDED, folder.path())
    options = ["--epochs", "12", "--checkpoint-every", "30", "--trace-samples", "--workers", "1"]
    code, output = run_job(
        *("--name", "recorded", "--storage", str(tmp_path), *options), env=environment(home), log=tmp_path / "log"
    )
    assert code == 0, output
    assert "changed setting" not in output  # options that are newer than the run had their defaults
    assert_whole(folder, replace(DIGITS, epochs=12, global_batch_size=64).stream(1437))
    rows = folder.rows("epochs.jsonl")
    assert [row["epoch"] for row in rows] == list(range(12))
    assert rows[-1]["validation"]["top1"] > 0.9
    events = folder.rows("events.jsonl")
    assert [event["event"] for event in events if event["event"] in ("resume", "finish")] == ["resume", "finish"]
    assert next(event["step"] for event in events if event["event"] == "resume") == 60
