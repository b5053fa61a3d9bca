"""A Ray of our own that starts late, or not at all."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import environment
from tests.support.messages import mentions

START = """
import os, sys, ray, ray._private.services as services
from raydali.launch.driver import own_node
from raydali.launch.driver.ray_cluster import connect
from raydali.launch.driver.command import run_main
from raydali.options.placement import PlacementOptions

own_node.WARN_SECONDS = 1.0
if len(sys.argv) > 1:
    services.RAYLET_EXECUTABLE = sys.argv[1]

def main():
    with connect(PlacementOptions(), lambda text: print("warning:", text, file=sys.stderr)):
        print(ray.get(ray.remote(lambda: f"a task was run at niceness {os.nice(0)}").remote()))

run_main(main)
"""


def started(home: Path, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
    home.mkdir()
    command = [sys.executable, "-c", START, *arguments]
    given = environment(home, **env)
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_start_that_fails_is_told_in_a_line(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.write_text("#!/bin/sh\nexit 3\n")
    raylet.chmod(0o755)
    done = started(tmp_path / "home", str(raylet))
    assert done.returncode == 1, done.stderr
    *warnings, error = done.stderr.splitlines()
    said = re.fullmatch(
        r"error: .*raylet.*load average \d+\.\d on \d+ cores?; "
        r".*(/tmp/raydali-\w{8})/session_latest/logs",
        error,
    )
    assert said and all(mentions(line, "warning: Ray") for line in warnings), done.stderr
    assert list(Path(said[1], "session_latest/logs").glob("gcs_server*"))
    shutil.rmtree(said[1])


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_agents_may_start_later_than_ray_waits_for_them(tmp_path: Path) -> None:
    """Ray alone gives them 15 s; the first task waits for them, the start does not."""
    late = "import sys, time\nif 'agent' in ' '.join(sys.orig_argv):\n    time.sleep(25)\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    path = f"{tmp_path}:{environment(tmp_path)['PYTHONPATH']}"
    done = started(tmp_path / "home", PYTHONPATH=path)
    assert (done.returncode, done.stdout) == (0, f"a task was run at niceness {os.nice(0)}\n"), done.stderr
