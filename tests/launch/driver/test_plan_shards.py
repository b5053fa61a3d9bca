"""`raydali plan` with `--shard`: the memory of other numbers of GPUs, after a short run whose files are made up."""

import json
import os
from pathlib import Path
from typing import Any, Literal

import pytest

from jobs.imagenet import JOB, Config
from raydali.launch.driver import plan
from raydali.run.folder import CONFIG, EPOCHS, EVENTS, FORM, RunFolder
from raydali.run.ledger import LEDGER, Held
from tests.measure.test_forecast import GIB, record
from tests.support.messages import mentions

WORKERS = 4


def launch(_job: object, given: Config, *_: Any) -> None:
    """On 4 GPUs of 80 GiB, each needs 34 GiB; a checkpoint has 96 GiB, of which 32 are weights."""
    folder = RunFolder(given.storage, str(given.name))
    folder.create()
    settings = {"samples": 1000, "batch_size": 10, "global_batch_size": 10 * WORKERS, "checkpoint_every": 0}
    folder.write_json(CONFIG, {"form": FORM, "keep_epochs": 0, **settings})
    folder.append(EPOCHS, record(80, WORKERS))
    folder.append(EVENTS, {"event": "start", "time": 100.0})
    group = Held(group="a-1", workers=WORKERS, placed=10.0, begun=20.0, released=100.0)
    folder.write_json(LEDGER, {"groups": [vars(group)]})
    for name, size in (("checkpoint_000000080/state.pt", 96 * GIB), ("best/model.safetensors", 32 * GIB)):
        folder.write(name, b"")
        os.truncate(folder.path(name), size)
    folder.write_json("checkpoint_000000080/manifest.json", {})


def planned(path: Path, monkeypatch: pytest.MonkeyPatch, shard: int | Literal["all"] | None) -> dict[str, Any]:
    monkeypatch.setattr(plan, "launch", launch)
    monkeypatch.setenv("COLUMNS", "200")
    config = Config(storage=str(path), shard=shard, batch_size=10)
    plan.plan(JOB, config, seconds=10, gpus=8, bandwidth=None, json=str(path / "plan.json"))
    assert not [*path.glob("plan-*")]
    found: dict[str, Any] = json.loads((path / "plan.json").read_text())
    return found


def test_a_sharded_run_has_the_memory_of_each_number_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(tmp_path, monkeypatch, "all")
    rows = {row["workers"]: (round(row["memory_bytes"] / GIB), row["fits"]) for row in found["gpus"]}
    assert rows == {1: (34 + 72 + 24, False), 2: (34 + 24 + 8, True), 4: (34, True), 8: (34 - 12, True)}
    assert (round(found["memory_bytes"] / GIB), found["sharded_over"]) == (34, 4)
    shown = capsys.readouterr().out
    for line in (
        "1 GPU 130.0 GiB may not fit",
        "2 GPUs at most 66.0 GiB",
        "4 GPUs 34.0 GiB",
        "8 GPUs at most 22.0 GiB",
    ):
        assert mentions(shown, line)
    assert mentions(shown, "memory of a worker: 34.00 GiB, sharded over 4")


def test_a_plan_speaks_of_whole_groups_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = planned(tmp_path, monkeypatch, 4)["gpus"]
    assert [(row["workers"], row["sharded_over"], round(row["memory_bytes"] / GIB)) for row in rows] == [
        (4, 4, 34),
        (8, 4, 34),
    ]


def test_a_plan_without_shards_has_no_column_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [row["workers"] for row in planned(tmp_path, monkeypatch, None)["gpus"]] == [1, 2, 4, 8]
    shown = capsys.readouterr().out
    assert "at most" not in shown and "sharded" not in shown and "34.00 GiB; the largest" in shown
