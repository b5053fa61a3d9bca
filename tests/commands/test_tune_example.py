"""docs/examples/tune.py on a cluster of its own: six trials are six runs with their own values, one of them fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment, nodes

RATES = (0.001, 0.01, 0.03, 0.1, 0.3)
PROGRAM = """
import importlib.util, json, sys
import ray
from ray import cloudpickle, tune
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
example = importlib.util.module_from_spec(spec)
sys.modules["example"] = example
spec.loader.exec_module(example)
cloudpickle.register_pickle_by_value(example)
ray.init()
space = {"learning_rate": tune.grid_search([*map(float, sys.argv[2:])]), "weight_decay": 1e-4}
results = example.search({"epochs": 2, "batch_size": 64, "cpus_per_worker": 1}, 1, space)
rates = [result.config["learning_rate"] for result in results if not result.error]
print("RESULT", json.dumps([results.num_errors, rates, results.get_best_result().metrics["validation/top1"]]))
"""


@pytest.mark.slow
def test_six_trials_are_runs_and_one_fails_alone(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with nodes(environment(home), tmp_path / "log", ["2"]) as (using, _):
        command = [sys.executable, "-c", PROGRAM, str(ROOT / "docs/examples/tune.py"), *map(str, RATES), "nan"]
        done = subprocess.run(command, env=using, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    errors, rates, best = json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])
    assert errors == 1 and sorted(rates) == [*RATES]
    runs = [*(home / "raydali-runs").iterdir()]
    assert len(runs) == len(RATES)
    assert sorted(json.loads((run / "config.json").read_text())["learning_rate"] for run in runs) == [*RATES]
    scores = [json.loads((run / "model.json").read_text())["best"]["score"] for run in runs]
    assert max(scores) == pytest.approx(best)
