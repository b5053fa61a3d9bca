"""`--model MODULE:FACTORY` on a cluster where some nodes cannot import the module: told before the workers start."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment, nodes
from tests.support.messages import mentions

pytestmark = [pytest.mark.slow]

NETS = """
import os, time
from torch import nn

if os.environ.get("LACKS_NETS"):
    raise ImportError("libnets.so: cannot open shared object file")

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
"""
ASK = """
import ray
from types import SimpleNamespace
from raydali.launch.driver import starting_weights

ray.init(log_to_driver=False)
starting_weights.IMPORT_SECONDS = 30
starting_weights.check_imports(SimpleNamespace(model="slow:build"), lambda line: print("warning:", line))
"""


def test_nodes_that_fail_or_are_silent_are_named(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "slow.py").write_text('import os, time\nos.environ.get("LACKS_NETS") and time.sleep(600)\n')
    (tmp_path / "home").mkdir()
    env = environment(tmp_path / "home", PYTHONPATH=f"{ROOT}:{tmp_path}")
    with nodes(env, tmp_path / "ray", ["1"], ["env", "LACKS_NETS=1", "1"]) as (using, ids):
        train = ["jobs/imagenet.py", "--model", "nets:build", "--workers", "2", "--storage", str(tmp_path / "runs")]
        refused, asked = (
            subprocess.run([sys.executable, *each], cwd=ROOT, env=using, capture_output=True, text=True, timeout=300)
            for each in (train, ["-c", ASK])
        )
    assert refused.returncode == 2, refused.stderr
    assert mentions(refused.stderr, f"error: nets:build {ids[1][:8]} ImportError: libnets.so")
    assert not [*(tmp_path / "runs").glob("*")]
    assert asked.returncode == 0 and mentions(asked.stdout, f"warning: 1 node {ids[1][:8]} slow"), asked.stderr
