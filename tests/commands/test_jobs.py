"""`raydali train` and `raydali new`: any job runs as the script that it is; a copy runs as it is."""

import signal
import subprocess
from pathlib import Path

import pytest

from raydali import cli
from tests.support.cluster import ROOT, environment
from tests.support.messages import mentions
from tests.test_cli import RAYDALI, run

SCRIPT = """
import os, sys
print(os.getpid(), __name__, __file__, sys.argv, "torch" in sys.modules)
sys.exit(7)
"""
NETS = """
from torch import nn

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder outside of the clone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_a_file_becomes_the_process(folder: Path) -> None:
    (folder / "own.py").write_text(SCRIPT)
    with subprocess.Popen([RAYDALI, "train", "own.py", "--help", "-x"], stdout=subprocess.PIPE, text=True) as process:
        said, _ = process.communicate(timeout=240)
    path = str(folder / "own.py")
    assert said == f"{process.pid} __main__ {path} {[path, '--help', '-x']} False\n"
    assert process.returncode == 7


def test_a_signal_reaches_the_job(folder: Path) -> None:
    (folder / "own.py").write_text("import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    with subprocess.Popen([RAYDALI, "train", "own.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline() == b"began\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(240) == -signal.SIGINT


@pytest.mark.slow
def test_the_options_of_a_job_are_its_own() -> None:
    shown = run("train", "imagenet", "--help")
    assert shown.returncode == 0 and "--random-area" in shown.stdout
    refused = run("train", "imagenet", "--epochs", "0")
    assert refused.returncode == 2 and mentions(refused.stderr, "error: --epochs 0")


@pytest.mark.parametrize("arguments", [(), ("--data", "x", "imagenet"), ("imgenet",)])
def test_without_a_job_those_that_are_there_are_named(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", *arguments])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1 and "imagenet" in said


def test_a_copy_runs_as_it_is(folder: Path) -> None:
    made = run("new", "imagenet", "my_job.py")
    assert made.returncode == 0 and made.stdout.endswith("raydali train my_job.py\n")
    text = (folder / "my_job.py").read_text()
    assert "python my_job.py --data" in text and "jobs/" not in text
    refused = run("train", "my_job.py", "--epochs", "0")
    assert refused.returncode == 2 and mentions(refused.stderr, "error: --epochs 0")
    again = run("new", "detection", "my_job.py")
    assert again.returncode == 2 and mentions(again.stderr, "my_job.py exists")
    assert (folder / "my_job.py").read_text() == text


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("gone/my.py", "mkdir gone"),
        ("/proc/my.py", "/proc takes"),  # it exists, though open() says that there is no such file
        (".", "my_job.py"),
        ("my_job", "my_job my_job.py"),
    ],
)
def test_a_copy_is_refused_in_one_line(file: str, named: str, folder: Path) -> None:
    refused = run("new", "imagenet", file)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1 and mentions(refused.stderr, named)
    assert not [*folder.iterdir()]


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_driver_and_workers_import_from_the_current_folder(folder: Path) -> None:
    (folder / "mynets.py").write_text(NETS)
    command = [RAYDALI, "train", "imagenet", "--model", "mynets:build", "--workers", "2", "--epochs", "1"]
    command += ["--storage", "runs", "--name", "own", "--no-ceiling"]
    env = environment(folder.parent / "home")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert mentions(done.stdout, f"finished {folder}/runs/own") and mentions(done.stdout, "2 workers cpu")
