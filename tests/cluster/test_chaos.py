"""`raydali chaos` in small: three nodes, one of which dies, a full disk, a damaged checkpoint and a killed driver."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from raydali.commands.chaos.faults import FAULTS
from tests.support.cluster import ROOT

COMMAND = str(Path(sys.executable).with_name("raydali"))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_lost_repeated_or_left(tmp_path: Path) -> None:
    faults = [name for name in ("disk", "node", "corrupt", "driver") if not FAULTS[name].unavailable()]
    file = tmp_path / "chaos.json"
    command = [COMMAND, "chaos", "--faults", ",".join(faults), "--nodes", "3", "--epochs", "30", "--json", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        said, errors = process.communicate(timeout=540)
    finally:
        process.terminate()  # not killed: it must end what it has started
        process.wait()
    assert process.returncode == 0, said + errors
    found = json.loads(file.read_text())
    assert [row["fault"] for row in found["rows"]] == faults
    assert all(row["lost"] == row["repeated"] == 0 for row in found["rows"]) and found["same_stream"]
    assert all(0 <= row["noticed_seconds"] <= row["resumed_seconds"] for row in found["rows"])
    assert found["losses"]["agree"] and len(found["losses"]["disturbed"]) == 30
    assert not any(found["left"].values())
    # By itself Ray keeps the places of a killed driver for 180 s, and those of a dead node for up to 33 s.
    assert all(row["resumed_seconds"] < 90 for row in found["rows"])
    assert "samples lost" in said
