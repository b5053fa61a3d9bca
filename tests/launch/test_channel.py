"""The channel to a driver that does not answer, on a real Ray."""

import os
import signal
from pathlib import Path

import pytest

from raydali.run.messages import Note
from tests.support.cluster import environment, nodes

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]


def test_a_worker_that_ends_keeps_its_own_error_if_the_driver_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel's process is stopped, and then killed."""
    with nodes(environment(tmp_path / "home"), tmp_path / "ray", ["1"]) as (using, _):
        import ray

        from raydali.launch import channel

        monkeypatch.setenv("RAY_AUTH_MODE", using["RAY_AUTH_MODE"])
        monkeypatch.setattr(channel, "POST_SECONDS", 0.1)
        ray.init(using["RAY_ADDRESS"], log_to_driver=False)
        try:
            driver = channel.DriverChannel("driver")
            pid = driver.call(os.getpid).result()
            for number in (signal.SIGSTOP, signal.SIGKILL):
                os.kill(pid, number)
                driver.post_and_wait(Note("the worker's error"))
        finally:
            ray.shutdown()
