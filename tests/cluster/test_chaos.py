"""Chaos in small: three nodes, one of which dies, a full disk, a damaged checkpoint and a killed driver."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.chaos.faults import FAULTS
from tests.support.cluster import ROOT

COMMAND = [sys.executable, "-m", "tests.support.chaos"]


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run(tmp_path: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, the output and the result of the command on three nodes."""
    file = tmp_path / "chaos.json"
    command = [*COMMAND, "--nodes", "3", "--json", str(file), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, errors = process.communicate(timeout=540)
    finally:
        process.terminate()  # not killed: it must end what it has started
        process.wait()
    assert "samples lost" in said, said + errors
    return process.returncode, said + errors, json.loads(file.read_text())


def chaos(tmp_path: Path, faults: list[str], *options: str) -> dict[str, Any]:
    """The result of the command, which has succeeded, with these faults."""
    code, output, found = run(tmp_path, "--faults", ",".join(faults), *options)
    assert code == 0, output
    assert [row["fault"] for row in found["rows"]] == faults
    assert all(row["lost"] == row["repeated"] == 0 for row in found["rows"]) and found["same_stream"]
    assert all(0 <= row["noticed_seconds"] <= row["resumed_seconds"] for row in found["rows"])
    assert found["losses"]["agree"] and not any(found["left"].values())
    return found


def possible(*faults: str) -> list[str]:
    """Those of these faults that this machine lets us inject."""
    return [name for name in faults if not FAULTS[name].unavailable()]


def test_nothing_is_lost_repeated_or_left(tmp_path: Path) -> None:
    found = chaos(tmp_path, possible("disk", "node", "corrupt", "driver"), "--epochs", "30")
    assert len(found["losses"]["disturbed"]) == 30
    # By itself Ray keeps the places of a killed driver for 180 s, and those of a dead node for up to 33 s.
    assert all(row["resumed_seconds"] < 90 for row in found["rows"])


def test_faults_for_which_the_run_is_too_short_are_missed(tmp_path: Path) -> None:
    code, output, found = run(tmp_path, "--kills", "9", "--epochs", "6")
    assert code == 1 and "raise --epochs" in output and "raise --epochs" in found["over"]
    assert len(found["rows"]) < 9 and found["same_stream"] and found["losses"]["agree"]
