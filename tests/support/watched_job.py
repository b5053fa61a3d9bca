"""The image job on a Ray of its own, which a test watches and disturbs while it trains on the digits."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.imagenet import DIGITS
from raydali.run.folder import RunFolder
from tests.support.cluster import IMAGENET, committed, descendants, kill, name_of, start_job

EPOCHS = 60
OPTIONS = ["--epochs", str(EPOCHS), "--trace-samples", "--checkpoint-every", "20", "--global-batch-size", "64"]
STREAM = replace(DIGITS, epochs=EPOCHS, global_batch_size=64).stream(1437)


@contextmanager
def running(
    env: dict[str, str], tmp_path: Path, *options: str, script: str = IMAGENET
) -> Iterator[tuple[Any, RunFolder]]:
    """The image job, past its first checkpoint."""
    folder, log = RunFolder(str(tmp_path), "run"), tmp_path / "log"
    process = start_job(
        *OPTIONS, *options, "--name", "run", "--storage", str(tmp_path), env=env, log=log, script=script
    )
    try:
        wait_for(lambda: committed(folder) >= 20, process, tmp_path)
        yield process, folder
    finally:
        kill([*descendants(process.pid), process.pid])
        process.wait()


def wait_for(condition: Callable[[], bool], process: Any, tmp_path: Path, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)


def trainers(pid: int) -> list[int]:
    return [below for below in descendants(pid) if "RayTrainWorker" in name_of(below)]


def events(folder: RunFolder, *names: str) -> list[dict[str, Any]]:
    return [row for row in folder.rows("events.jsonl") if row["event"] in names]
