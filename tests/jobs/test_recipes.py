"""A recipe as a user runs it: with options of their own, to the end, and once more."""

import json
import re
from pathlib import Path

import pytest

from tests.support.cluster import environment, run_job


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_run_ends_with_the_published_figure_beside_its_own(tmp_path: Path) -> None:
    given = "--recipe fashion --model digits --epochs 1 --warmup-epochs 0.2 --global-batch-size 96 --no-gpu --workers 3"
    arguments = [*given.split(), "--no-ceiling", "--storage", str(tmp_path / "runs"), "--name", "run"]
    env, log = environment(tmp_path), tmp_path / "log"
    code, said = run_job(*arguments, env=env, log=log)
    assert code == 0, said
    settings = json.loads((tmp_path / "runs/run/config.json").read_text())
    assert (settings["recipe"], settings["batch_size"], settings["global_batch_size"]) == ("fashion", 32, 96)
    last = json.loads((tmp_path / "runs/run/epochs.jsonl").read_text().splitlines()[-1])
    beside = f"top-1 {last['validation']['top1']:.4f}; recipe fashion: 0.967 published (Fashion-MNIST, WRN40-4)"
    assert f"{beside}; this run differs: --epochs 1 instead of 180, " in said
    differing = re.findall("differs from recipe fashion: (--[a-z-]+) ", said)
    assert differing == ["--epochs", "--global-batch-size", "--batch-size", "--model", "--warmup-epochs"]
    assert beside[6:] in (tmp_path / "runs/run/report.html").read_text()
    code, said = run_job(*arguments, env=env, log=log)
    assert code == 0 and "is finished" in said
    changed = [word.replace("fashion", "a2") for word in arguments]
    code, said = run_job(*changed, env=env, log=log)
    assert code == 2 and "recipe was 'fashion'" in said
