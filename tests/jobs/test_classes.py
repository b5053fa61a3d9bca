"""The classes of each job in a run's model.json: their names in order, and the labels that the model gives them."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from raydali.launch.driver.launcher import Job
from raydali.launch.driver.starting_weights import model_facts

CLASSES = {
    "imagenet": {str(digit): digit for digit in range(10)},
    "video": {"down": 0, "left": 1, "right": 2, "up": 3},
    "detection": {"disc": 1, "rectangle": 2, "triangle": 3},
    "restoration": {},
}


@pytest.mark.parametrize("name", CLASSES)
def test_model_json_names_the_classes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, launched = import_module(f"jobs.{name}"), list[Job]()
    monkeypatch.setattr(job, "launch", lambda job, *_: launched.append(job))  # without Ray, whose start takes seconds
    monkeypatch.setattr(sys, "argv", [name, "--storage", str(tmp_path)])
    job.main()
    facts = model_facts(f"jobs/{name}.py", launched[0].labeled_classes, {}, None)
    assert facts["classes"] == [*CLASSES[name]] and facts["labels"] == CLASSES[name]
