"""The section on the trained model: what it says of an evaluation, and what lies there under its name."""

import json
from pathlib import Path
from typing import Any

import pytest

from raydali.report.html import evaluation
from raydali.report.html.evaluation import MAX_CLASSES, SHADES, evaluation_section
from raydali.report.html.history import History
from raydali.report.html.live import PAUSE_SECONDS, LiveReport
from raydali.report.html.page import run_page
from raydali.run.folder import EVALUATION, WORST, RunFolder
from tests.support.evaluations import found
from tests.support.report_pages import history, text
from tests.support.report_runs import record, write


def page(content: bytes | None, worst: bytes | None = None) -> bytes:
    made = history([record(0)])
    files = {EVALUATION: content, WORST: worst}
    made.files = {name: found for name, found in files.items() if found is not None}
    return run_page(made)


def encoded(**changes: Any) -> bytes:
    return json.dumps(found(3) | changes).encode()


def test_what_was_found_is_said() -> None:
    said = text(page(encoded()))
    assert "best/model.safetensors of epoch 7 on the built-in data: 60 samples" in said
    assert "top1 0.75" in said and "calibration_error 0.125" in said
    assert "off by 12.5% on average" in said and "mean confidence is 87.5%, and 75.0% of" in said
    assert "overconfident" in said
    assert "3 classes, those with the lowest recall first" in said
    assert "class 2 20 0.3333 0.5 \u2013 class 1 20 0.6667" in said
    assert "The 2 most frequent confusions class predicted samples class 2 class 1 9 class 0 class 2 1" in said
    assert "2 samples left out, since they cannot be read path reason /data/a.jpg empty" in said


def test_cells_are_as_strong_as_their_share_of_the_row() -> None:
    section = evaluation_section(encoded(confusion=[[16, 0, 4], [0, 20, 0], [0, 0, 0]]))
    assert section is not None
    least, most = SHADES
    texts, shades = ([[cell[i] for cell in cells] for _, cells in section["matrix"]] for i in range(2))
    assert texts == [["16", "", "4"], ["", "20", ""], [""] * 3]
    assert shades[1:] == [[0, most, 0], [0, 0, 0]] and least < shades[0][2] < shades[0][0] < most
    assert section["matrix"][0][1][2][2] == "class 0 predicted as class 2: 4 of 20"


def test_many_classes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    section = evaluation_section(json.dumps(found(150)).encode())
    assert section is not None and not section["matrix"] and len(section["rows"]) == MAX_CLASSES
    assert section["note"].startswith("100 of 150 classes")
    assert [row[0] for row in section["rows"][:2]] == ["class 149", "class 148"]
    monkeypatch.setattr(evaluation, "MAX_BROKEN", 1)
    said = text(page(encoded()))
    assert "2 samples left out" in said and "/data/a.jpg" in said and "/data/b.jpg" not in said


@pytest.mark.parametrize("changes", [{"classes": [], "confusion": None}, {"metrics": {"psnr": 31.5, "ssim": None}}])
def test_what_is_not_there_is_not_shown(changes: dict[str, Any]) -> None:
    said = text(page(encoded(**changes)))
    assert "60 samples" in said and "cannot be read." not in said
    assert ("Confusion matrix" in said) == ("classes" not in changes)
    assert ("Calibration" in said) == ("metrics" not in changes)
    assert text(page(None)).count("Evaluation") == 0


FOREIGN = [
    b"", b"no json", b"[1, 2]", b"null", b'{"metrics": {}}', b"\xff\xfe", b'{"a": ' + b"[" * 100_000,
    encoded(classes=[{"class": "a"}]), encoded(confusion=[[1, 2], [3]]), encoded(metrics=3), encoded(broken=[1]),
]  # fmt: skip


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_file_costs_the_section_alone(content: bytes) -> None:
    said = text(page(content, b"no picture"))
    assert "evaluation.json cannot be read." in said and "1 of 10 epochs" in said


def test_the_page_of_a_run_has_the_newest(tmp_path: Path) -> None:
    folder = RunFolder(str(tmp_path), "run")
    folder.create()
    write(folder, [record(0)], [])
    now = [0.0]
    live = LiveReport(folder, pytest.fail, lambda: now[0])

    def shown() -> str:
        live.epoch(record(1))
        now[0] += PAUSE_SECONDS
        live.poll()
        return text(folder.read("report.html"))

    assert "Evaluation" not in shown()
    folder.write_json(EVALUATION, found(3))
    folder.write(WORST, b"no picture")
    assert "60 samples" in shown()
    assert History.read(folder).files[WORST] == b"no picture"
    folder.write_json(EVALUATION, found(3) | {"samples": 61_234})
    folder.remove(WORST)
    assert "61,234 samples" in shown()
    folder.remove(EVALUATION)
    assert "Evaluation" not in shown()
