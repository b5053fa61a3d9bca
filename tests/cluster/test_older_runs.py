"""A run that an earlier version began: recorded_run/ was made by 058a04e, and killed between two checkpoints.

    python jobs/imagenet.py --epochs 12 --checkpoint-every 30 --trace-samples --name recorded

Its newest checkpoint is of step 60; rows and traces reach up to step 68, as a kill leaves them.
"""

import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.imagenet import DIGITS
from raydali.inference.trained_run import open_run
from raydali.run.folder import RunFolder
from tests.support.broken import jpeg
from tests.support.cluster import committed, environment, run_job, start_job
from tests.support.messages import mentions
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


OLDER_JOB = """
from dataclasses import replace
from jobs import imagenet
from raydali.data.sources.file_rules import FIRST, following
from raydali.launch.driver.command import run_job

def open_data(config):
    with following(FIRST):
        return imagenet.open_data(config)

JOB = replace(imagenet.JOB, open_data=open_data)
if __name__ == "__main__":
    run_job(JOB)
"""
"""Takes for samples what other systems leave behind, as 358e123 does."""


@pytest.mark.slow
def test_a_run_keeps_samples_that_other_systems_left_behind(tmp_path: Path) -> None:
    env, folder = environment(tmp_path / "home"), RunFolder(str(tmp_path), "older")
    (tmp_path / "home").mkdir()
    for split, files in (("train", 8), ("val", 2)):
        for class_ in ("cat", "dog"):
            names = [*(f"{place}.jpg" for place in range(files)), "._1.jpg", "@eaDir/0.jpg/SYNOPHOTO_THUMB_M.jpg"]
            for place, name in enumerate(names):
                path = tmp_path / "data" / split / class_ / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(jpeg((40 + place, 40)))
        (tmp_path / "data" / split / "__MACOSX").mkdir()
        shutil.copy(path, tmp_path / "data" / split / "__MACOSX/x.jpg")
    (tmp_path / "older.py").write_text(OLDER_JOB)
    options = ["--data", str(tmp_path / "data"), "--model", "digits", "--image-size", "32", "--precision", "fp32"]
    options += ["--batch-size", "4", "--epochs", "40", "--checkpoint-every", "5", "--no-ceiling", "--trace-samples"]
    options += ["--workers", "1", "--storage", str(tmp_path), "--name", "older"]
    process = start_job(*options, env=env, log=tmp_path / "first", script=str(tmp_path / "older.py"))
    while committed(folder) < 15 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, (tmp_path / "first").read_text()
    settings = folder.read_json("config.json")
    assert settings.pop("file_rules") == 2  # which 358e123 does not write
    assert (settings["samples"], settings["fingerprint"]) == (21, "999736f12e3c4e164a45d087e201ceb0")  # of 358e123
    folder.write_json("config.json", settings)

    code, output = run_job(*options, env=env, log=tmp_path / "log")
    assert code == 0, output
    assert mentions(output, "21 9 3 '__MACOSX' 'cat' 'dog'") and "changed setting" not in output
    run = open_run(str(folder))
    assert_whole(folder, run.config.stream(21))
    assert (len(run.data.train), len(run.data.val)) == (21, 9)
    code, output = run_job(*options[:-1], "newer", "--epochs", "1", env=env, log=tmp_path / "newer.log")
    assert code == 0 and mentions(output, "16 4 2 'cat' 'dog'"), output
