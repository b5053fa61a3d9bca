"""A job on a Ray of its own whose disk is full for a while: it goes on, and says so."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.imagenet import DIGITS
from raydali.run.folder import RunFolder
from tests.support.cluster import committed, descendants, environment, kill, start_job
from tests.support.disks import small_disk
from tests.support.messages import mentions
from tests.support.traces import assert_whole


@pytest.mark.slow
def test_a_job_goes_on_while_its_disk_is_full(tmp_path: Path) -> None:
    home, log = tmp_path / "home", tmp_path / "log"
    home.mkdir()
    options = ["--epochs", "30", "--batch-size", "32", "--checkpoint-every", "20", "--trace-samples", "--no-ceiling"]
    with small_disk(tmp_path / "disk", kilobytes=40_000) as disk:
        folder = RunFolder(str(disk.path), "run")
        options += ["--name", "run", "--storage", str(disk.path), "--workers", "2"]
        process = start_job(*options, env=environment(home), log=log)
        deadline = time.monotonic() + 150

        def wait_while(condition: bool) -> bool:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)
            return condition

        try:
            while wait_while(committed(folder) < 20):
                pass
            disk.fill()
            while wait_while("cannot be written" not in log.read_text()):
                pass
            during = committed(folder)
            disk.clear()
            assert process.wait(150) == 0, log.read_text()
        finally:
            kill([process.pid, *descendants(process.pid)] if process.poll() is None else [])
        output = log.read_text()
        assert mentions(output, "warning: No space left on device")
        events = folder.rows("events.jsonl")
        failed = [event for event in events if event["event"] == "checkpoint failed"]
        assert failed and failed[0]["path"].startswith(f"{disk.path}/run/checkpoint_") and failed[0]["step"] > during
        assert events[-1]["event"] == "finish" and "failure" not in [event["event"] for event in events]
        stream = replace(DIGITS, epochs=30, batch_size=32, global_batch_size=64).stream(1437)
        assert_whole(folder, stream)
        assert [row["epoch"] for row in folder.rows("epochs.jsonl")] == list(range(30))
        assert committed(folder) == stream.steps
