"""`bench scale`: its rows, what must grow in them and what must not, and refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydali.bench.scale import command, components
from raydali.bench.scale.command import ScaleBench
from raydali.errors import CommandError, UsageError
from raydali.run.folder import RunFolder
from tests.support.messages import mentioning, mentions

OPTIONS = ScaleBench(ranks="1,4,16", samples=20_000, epochs=3, batch_size=64)


def test_rows_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scale.json"
    result = command.main(replace(OPTIONS, json=str(path)))
    assert json.loads(path.read_text())["rows"][0]["figures"].keys() == {"1", "4", "16"}
    figures = {row["name"]: row["figures"] for row in result["rows"]}
    assert all(value is not None and value > 0 for row in figures.values() for value in row.values())
    (line,) = (row for name, row in figures.items() if mentions(name, "line driver"))
    assert 10 < (line[16] - line[1]) / (line[4] - line[1]) * 3 < 20  # so much for each rank
    assert next(row for name, row in figures.items() if "epochs.jsonl" in name)[16] == 3 * line[16]
    assert len(set(next(row for name, row in figures.items() if "index" in name).values())) == 1
    output = capsys.readouterr().out
    assert mentions(output, "20,000 samples 3 epochs 64 worker") and mentions(output, "connect (gloo)")


def test_a_line_is_as_long_as_a_run_writes_it(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    folder.append("epochs.jsonl", components._line(4))
    assert (tmp_path / "run/epochs.jsonl").stat().st_size == components.line_bytes(4)


def test_what_cannot_be_measured_is_said_behind_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 256))
    with pytest.raises(CommandError, match=mentioning("store 1 1002 files 256")):
        command.main(replace(OPTIONS, ranks="1"))
    assert "epochs.jsonl of the run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "1,x"}, "--ranks 1 16384 1,64,1024 1,x"),
        ({"ranks": "0"}, "--ranks 1"),
        ({"ranks": "99999"}, "--ranks 1"),
        ({"epochs": 0}, "--epochs 1 0"),
        ({"samples": 100}, "100 1024 16 --samples"),
        ({"json": "/nowhere/scale.json"}, "--json /nowhere/scale.json"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=mentioning(message)):
        command.main(replace(OPTIONS, **options))
