"""A notice that one rank has: all leave at one step, behind a checkpoint that covers it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.imagenet import train
from raydali.data.stream.stream import Stream
from raydali.launch.channel import Interrupted
from raydali.run.folder import RunFolder
from tests.support.digits import SHORT, few_digits
from tests.support.ranks import LocalSession, folder_of, run_ranks
from tests.support.traces import assert_whole


class Noticed(LocalSession):
    """A session that has a notice from a step on, on one rank."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        super().__init__(folder)
        self._notice_at = step if self.worker.rank == self.worker.world_size - 1 else None

    def report_progress(self, stream: Stream) -> None:
        if self.cursor.done == self._notice_at:
            self.noticed = "preemption"


def leave(train: Callable[..., None], config: Any, data: Any, folder: RunFolder, step: int) -> tuple[str, int]:
    session = Noticed(folder, step)
    try:
        train(config, data, session)
    except Interrupted as interrupted:
        state = session.checkpoints.newest()
        assert state is not None
        return interrupted.notice, state["stream"]["samples_consumed"] // config.global_batch_size
    raise AssertionError("it did not leave")


def finish(train: Callable[..., None], config: Any, data: Any, folder: RunFolder) -> None:
    session = LocalSession(folder)
    train(config, data, session)
    session.checkpoints.finish()


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_all_ranks_leave_at_one_step_and_go_on_there(tmp_path: Path, world_size: int) -> None:
    config, data = replace(SHORT, name="run"), few_digits(tmp_path / "digits")
    folder = folder_of(tmp_path)
    left = run_ranks(world_size, leave, train, config, data, folder, 4)
    assert left == [("preemption", 5)] * world_size  # told behind step 4, agreed and gone behind step 5
    run_ranks(3, finish, train, config, data, folder)
    assert_whole(folder, config.stream(len(data.train)))
