"""Modules that joined others can be imported by jobs that were copied before."""

from importlib import import_module

import pytest


@pytest.mark.parametrize(
    ("module", "name"),
    [("mixing", "mixing"), ("averaging", "MovingAverage"), ("models.video", "build_video_model")],
)
def test_a_copied_job_finds_what_it_imports(module: str, name: str) -> None:
    assert getattr(import_module(f"raydali.train.{module}"), name).__name__ == name
    with pytest.raises(AttributeError):
        getattr(import_module(f"raydali.train.{module}"), "no_such_name")  # noqa: B009
