"""What `raydali evaluate` refuses, before anything is loaded: one line that names the value."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import imagenet
from raydali.commands import evaluate
from raydali.commands.evaluate import Evaluate
from raydali.data.sources.builtin.digits import digits_folder
from raydali.errors import UsageError
from raydali.run.folder import RunFolder
from tests.support.messages import mentioning
from tests.support.trained_runs import dealt_to, made_run, started_run

CLASSES = [*map(str, range(10))]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return made_run(tmp_path, imagenet, imagenet.DIGITS, CLASSES)


def refused(run: RunFolder | Path | str, named: str, **given: Any) -> None:
    with dealt_to(1), pytest.raises(UsageError, match=mentioning(named)) as error:
        evaluate.main(Evaluate(run=str(run), **given))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", b"{", "config.json"),
        ("config.json", b"[1]", "config.json"),
        ("config.json", b"\xff", "config.json"),
        ("config.json", b'{"epochs": "many"}', "config.json"),
        ("model.json", b"{", "model.json"),
        ("model.json", b"[1]", "model.json"),
        ("model.json", b'{"job": "imagenet"}', "model.json"),
        ("model.json", b'{"job": {"name": "imagenet"}, "classes": 3}', "model.json"),
        ("model.json", b'{"job": {"name": "gone"}, "classes": ["a"]}', "gone"),
        ("model.json", b'{"job": {"name": "imagenet"}, "classes": ["a", "b"]}', "classes"),
        ("best/model.safetensors", b"", "best/model.safetensors"),
        ("best/model.safetensors", b"x" * 100, "best/model.safetensors"),
        ("best/model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "best/model.safetensors"),
    ],
)
def test_broken_files_of_the_run(run: RunFolder, file: str, content: bytes, named: str) -> None:
    run.write(file, content)
    refused(run, named)


def test_what_is_no_run_or_has_no_weights_yet(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty config.json")
    refused(tmp_path / "nowhere", "nowhere")
    started = started_run(tmp_path, imagenet, imagenet.DIGITS, CLASSES, name="started")
    refused(started, "started best/model.safetensors")
    refused(started, "started checkpoint", checkpoint="newest")
    refused(run, "--gpu", gpu=True, no_gpu=True)
    refused(run, "--batch-size 0", batch_size=0)
    refused(run, "nowhere/e.json", json=str(tmp_path / "nowhere/e.json"))


def job_in(folder: Path, change: Callable[[str], str]) -> Path:
    assert imagenet.__file__ is not None
    file = folder / "my_job.py"
    file.write_text(change(Path(imagenet.__file__).read_text()))
    return file


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("def val_pipeline", "def other_pipeline", "my_job.py val_pipeline"),
        ("def build_model", "def built", "my_job.py build_model"),
        ("from dataclasses", "import nothing_of_that_name\nfrom dataclasses", "my_job.py nothing_of_that_name"),
        ("return ValidationImages(", "return dict(", "dict"),
    ],
)
def test_other_jobs(run: RunFolder, tmp_path: Path, old: str, new: str, named: str) -> None:
    refused(run, named, job=str(job_in(tmp_path, lambda text: text.replace(old, new))))


def test_the_job_of_the_user(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It must lie where the run found it; a warning says that it has changed."""
    monkeypatch.chdir(tmp_path)
    facts = run.read_json("model.json")
    run.write_json("model.json", facts | {"job": {"file": "my_job.py", "sha256": "0" * 64}})
    refused(run, "my_job.py --job")
    job_in(tmp_path, str)
    with dealt_to(1):
        evaluate.main(Evaluate(run=str(run)))
    assert "my_job.py" in caplog.text and "changed" in caplog.text


def test_other_data(run: RunFolder, tmp_path: Path) -> None:
    for name in ("0", "1", "lynx"):
        shutil.copytree(Path(digits_folder(), "val/3"), tmp_path / "data" / name)
    refused(run, "lynx", data=str(tmp_path / "data"))
    refused(run, "nowhere", data=str(tmp_path / "nowhere"))
    (tmp_path / "list.csv").write_text("data/0/0003.jpg,unknown\n")
    refused(run, "unknown", data=str(tmp_path / "list.csv"))
    refused(run, "--root", data=str(tmp_path / "data"), root="/data")
