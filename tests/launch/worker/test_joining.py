"""A process that prepares to replace a lost rank decides alone what the others have decided together."""

from dataclasses import replace
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from jobs.imagenet import DIGITS
from raydali.data.sources.image_folder import ImageFolder
from raydali.data.tasks.classification import TrainImages
from raydali.errors import NodeError
from raydali.launch.worker import hardware_choices
from raydali.launch.worker.hardware_choices import chosen
from raydali.launch.worker.missing_samples import check_samples
from raydali.run.folder import CONFIG, RunFolder
from tests.support.messages import mentioning
from tests.support.pictures import encoded, files, photograph


def alone(**attributes: Any) -> Any:
    """A worker that is not joined: what ranks exchange, it has from itself only."""
    cpu = torch.device("cpu")
    given = {"joined": False, "rank": 1, "node": "a", "device": cpu, **attributes}
    return SimpleNamespace(exchange=lambda mine: [mine], from_first=lambda mine: mine, **given)


@pytest.fixture
def source(tmp_path: Path) -> ImageFolder:
    return files(tmp_path / "images", a=encoded(photograph("china", (40, 40))))


def test_a_node_without_the_samples_is_named(source: ImageFolder) -> None:
    """Otherwise they would be broken, and end the run of ranks that have them."""
    loader: Any = SimpleNamespace(source=source, pipeline=TrainImages(image_size=32, seed=0))
    check_samples(loader, alone())
    Path(source.path(0)).unlink()
    with pytest.raises(NodeError, match=mentioning("node a lacks 1 of 1 sample mount")):
        check_samples(loader, alone())
    check_samples(loader, alone(joined=True))  # all ranks are on this node: each finds for itself what is missing


def test_options_are_those_that_rank_0_has_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those for this hardware; a spare may ask before there are any."""
    monkeypatch.setattr(hardware_choices, "has_bf16", lambda _: True)
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    folder.write_json(CONFIG, {})
    session: Any = SimpleNamespace(worker=alone(), folder=folder)
    values = {"precision": "fp16", "compile": True, "fused": False}
    Timer(0.2, folder.write_json, (CONFIG, values)).start()
    options = chosen(replace(DIGITS, precision=None, compile=None, fused=None), session, samples=100)
    assert {name: getattr(options, name) for name in values} == values
