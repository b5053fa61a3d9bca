"""The classes of each job in a run's model.json: their names in order, and the labels that the model gives them."""

from importlib import import_module

import pytest

from raydali.launch.driver.launcher import _model_facts

CLASSES = {
    "imagenet": {str(digit): digit for digit in range(10)},
    "video": {"down": 0, "left": 1, "right": 2, "up": 3},
    "detection": {"disc": 1, "rectangle": 2, "triangle": 3},
    "segmentation": {"background": 0, "disc": 1, "rectangle": 2, "triangle": 3},
    "restoration": {},
}


@pytest.mark.parametrize("name", CLASSES)
def test_model_json_names_the_classes(name: str) -> None:
    job = import_module(f"jobs.{name}").JOB
    facts = _model_facts(job, job.open_data(job.demo).train, {}, None)
    assert facts["classes"] == [*CLASSES[name]] and facts["labels"] == CLASSES[name]
