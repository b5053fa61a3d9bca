"""The wheel and the source distribution; and what they install, in an environment outside of the clone."""

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, environment
from tests.support.messages import mentions

BIN = Path(sys.executable).parent
UV = str(BIN / "uv")
LOCK = str(ROOT / "requirements.lock")
TAKE = "import importlib.util, raydali; print(raydali.__file__, *map(importlib.util.find_spec, {names!r}), sep='\\n')"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, as `make wheel` builds them: the wheel from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    command = [UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


@pytest.mark.slow
def test_a_registry_would_take_both(built: Path) -> None:
    files = [*built.glob("raydali-*")]
    done = subprocess.run([BIN / "twine", "check", "--strict", *files], capture_output=True, text=True)
    assert len(files) == 2 and done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_has_the_package_and_the_jobs_alone(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    in_wheel = {name for name in names if ".dist-info/" not in name}
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "raydali", "jobs"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert in_wheel == {name.replace("jobs/", "raydali/job-scripts/", 1) for name in tracked}
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_the_sources_are_whole(built: Path) -> None:
    (sources,) = built.glob("*.tar.gz")
    with tarfile.open(sources) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    whole = "Makefile requirements.lock README.md LICENSE jobs/video.py tests/test_install.py docs/cli.md mkdocs.yml"
    assert set(whole.split()) <= names
    assert not [name for name in names if name.startswith((".venv", ".ci", "build/")) or "cache" in Path(name).parts]


def test_a_job_of_the_wheel_is_a_script_and_no_module(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    names = ["raydali.jobs", "jobs", "tests", "imagenet"]
    # Without site-packages, which may lead to the clone.
    command = [sys.executable, "-S", "-P", "-c", TAKE.format(names=names)]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "raydali/__init__.py"), *["None"] * len(names)], done.stderr


def installed(wheel: Path, folder: Path, *options: str | Path) -> Path:
    """The `bin` of a new environment with the wheel and the locked versions of what it needs."""
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", folder, "--constraint", LOCK, *options, wheel]
    subprocess.run(install, check=True)
    return folder / "bin"


def call(programs: Path, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run raydali in an empty folder."""
    (folder / "here").mkdir(exist_ok=True)
    env = environment(folder / "home", PATH=f"{programs}:{os.environ['PATH']}")
    del env["PYTHONPATH"]
    command = ["raydali", *arguments]
    return subprocess.run(command, cwd=folder / "here", env=env, capture_output=True, text=True, timeout=500)


TRAIN = ("train", "imagenet", "--epochs", "1", "--no-ceiling", "--storage", "runs", "--name", "first")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("ray")
def test_an_installed_wheel_trains(wheel: Path, tmp_path: Path) -> None:
    done = call(installed(wheel, tmp_path / "venv"), tmp_path, *TRAIN)
    assert done.returncode == 0 and mentions(done.stdout, f"finished {tmp_path}/here/runs/first"), done.stderr
    assert not mentions(done.stdout, "DALI PyTorch's")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("ray")
def test_without_a_gpu_what_the_docs_leave_out_is_not_needed(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines = re.findall(r"^(.+); sys_platform == 'never'$", (ROOT / "docs/quick-start.md").read_text(), re.MULTILINE)
    (tmp_path / "no-gpu.txt").write_text("".join(f"{name}; sys_platform == 'never'\n" for name in lines))
    programs = installed(wheel, tmp_path / "venv", "--override", tmp_path / "no-gpu.txt")
    listed = subprocess.run([UV, "pip", "list", "--python", programs.parent], capture_output=True, text=True).stdout
    assert "triton" in lines and not {*lines} & {*listed.split()} and "torch" in listed.split()
    done = call(programs, tmp_path, *TRAIN)
    assert done.returncode == 0 and mentions(done.stdout, f"finished {tmp_path}/here/runs/first"), done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("ray")
def test_without_dali_pytorch_s_loader_trains(wheel: Path, tmp_path: Path) -> None:
    programs = installed(wheel, tmp_path / "venv")
    subprocess.run([UV, "pip", "uninstall", "--quiet", "--python", programs.parent, "nvidia-dali-cuda120"], check=True)
    done = call(programs, tmp_path, *TRAIN)
    assert done.returncode == 0 and mentions(done.stdout, "DALI PyTorch's"), done.stderr
    assert json.loads((tmp_path / "here/runs/first/config.json").read_text())["loader"] == "torch"

    digits = f"{tmp_path}/cache/raydali/digits-v1"
    sheet = call(programs, tmp_path, "preview", "--data", digits, "--batch-size", "4", "-o", "sheet.png")
    assert sheet.returncode == 0 and (tmp_path / "here/sheet.png").exists(), sheet.stderr
    for command, named in (
        ("train imagenet --loader dali", "--loader dali"),
        (f"train grid --data {digits}/train", "nvidia-dali-cuda120"),
        ("bench loader --make 8", "--loaders raydali"),
        ("bench train --make 8", "--loaders raydali"),
    ):
        refused = call(programs, tmp_path, *command.split())
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert mentions(refused.stderr, f"error: {named} DALI")
