"""raydali.train and raydali.Run: runs from Python and from a notebook, and what is left of them in the process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import raydali
from raydali.commands.from_python import _arguments
from raydali.run.folder import EVENTS
from tests.support.messages import mentioning

SMALL: dict[str, Any] = {"epochs": 2, "workers": 1, "cpus_per_worker": 1, "ceiling": False, "name": "digits"}


def test_keywords_are_options() -> None:
    options = {"global_batch_size": 64, "ceiling": False, "no_gpu": True, "random_area": (0.1, 1), "data": None}
    assert [*_arguments(options)] == ["--global-batch-size=64", "--no-ceiling", "--no-gpu", "--random-area", "0.1", "1"]


@pytest.mark.parametrize(
    ("job", "options", "words"),
    [
        ("imagenet", {"epoch": 2}, "no option --epoch --epochs"),
        ("imagenet", {"data": "/nowhere"}, "/nowhere does not exist"),
        ("imagenat", {}, "imagenat try imagenet"),
    ],
)
def test_what_the_command_line_refuses_is_an_error(
    job: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(raydali.UsageError, match=mentioning(words)):
        raydali.train(job, storage=str(tmp_path), **options)


@pytest.mark.slow
def test_a_run_is_trained_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    rows: list[dict[str, Any]] = []
    run = raydali.train("imagenet", storage=str(tmp_path), on_epoch=rows.append, **SMALL)
    assert run.folder == f"{tmp_path}/digits" and [row["epoch"] for row in rows] == [0, 1]
    assert rows == run.epochs and {"loss", "images_per_second", "validation/top1", "verdict"} <= rows[0].keys()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == handlers

    best = run.best
    assert best is not None and Path(best["weights"]).is_file()
    assert run.evaluate()["metrics"]["top1"] == pytest.approx(best["score"], abs=1e-6)
    assert "srcdoc=" in run._repr_html_()
    images = raydali.digits_folder()
    written = run.predict(f"{images}/val", str(tmp_path / "labels.csv"))
    assert len(Path(written).read_text().splitlines()) == 1 + 360
    with pytest.raises(raydali.UsageError, match=mentioning("labels.csv exists")):
        run.predict(f"{images}/val", written)

    assert raydali.train("imagenet", storage=str(tmp_path), **SMALL).epochs == rows, "a finished run stays as it is"


@pytest.mark.slow
def test_an_error_of_on_epoch_interrupts_the_run_and_the_next_call_resumes_it(tmp_path: Path) -> None:
    def stop(row: dict[str, Any]) -> None:
        raise LookupError(row["epoch"])

    options = SMALL | {"epochs": 40}
    with pytest.raises(LookupError, match="0"):
        raydali.train("imagenet", storage=str(tmp_path), on_epoch=stop, **options)
    run = raydali.Run(f"{tmp_path}/digits")
    trained = len(run.epochs)
    assert 1 <= trained < 40
    rows: list[dict[str, Any]] = []
    raydali.train("imagenet", storage=str(tmp_path), on_epoch=rows.append, **options)
    assert [row["epoch"] for row in rows] == [*range(trained, 40)]


@pytest.mark.slow
def test_a_run_ends_with_the_process_that_called_it(tmp_path: Path) -> None:
    options = SMALL | {"epochs": 1000, "storage": str(tmp_path)}
    program = f"import raydali; raydali.train('imagenet', on_epoch=lambda row: print('epoch', row), **{options})"
    caller = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert caller.stdout is not None
    assert any(line.startswith("epoch {") for line in caller.stdout)
    os.kill(caller.pid, signal.SIGKILL)
    caller.communicate()
    deadline = time.monotonic() + 180
    while True:
        last = (tmp_path / "digits" / EVENTS).read_text().splitlines()[-1]
        if json.loads(last)["event"] == "interrupt":
            break
        assert time.monotonic() < deadline, last
        time.sleep(0.2)


@pytest.mark.slow
def test_in_a_notebook(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        f"import raydali\nrun = raydali.train('imagenet', storage='{tmp_path}', **{SMALL})",
        "run",
        "len(run.epochs)",
        "raydali.train('imagenet', nothing=1)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=600, allow_errors=True, kernel_name="python3").execute()
    trained, picture, count, refused = (cell.outputs for cell in notebook.cells)
    assert "finished" in "".join(output["text"] for output in trained)
    assert picture[0]["data"]["text/html"].startswith("<iframe srcdoc=")
    assert count[0]["data"]["text/plain"] == "2"
    assert "no option --nothing" in refused[-1]["evalue"]
