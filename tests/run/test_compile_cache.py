"""What torch.compile made: it stays on the node and with the run, and a damaged artifact ends nothing."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

from jobs.imagenet import train
from raydali.run.compile_cache import FOLDER, NODE_FOLDERS, CompileCache, enter_working_folder, use_node_folders
from raydali.run.folder import RunFolder
from raydali.training.forward_backward import ForwardBackward, Precision
from raydali.training.worker import Worker
from tests.support.digits import SHORT, digits_data
from tests.support.ranks import CPU, LocalSession, folder_of, run_ranks


def test_compilers_use_folders_of_the_node_that_the_user_has_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in NODE_FOLDERS:
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    use_node_folders()
    assert os.environ["TRITON_CACHE_DIR"] == "/mine"
    for variable in NODE_FOLDERS.keys() - {"TRITON_CACHE_DIR"}:
        assert Path(os.environ[variable]).is_dir() and Path(os.environ[variable]).is_relative_to(tmp_path / "raydali")


def test_a_node_without_a_folder_for_caches_keeps_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in NODE_FOLDERS:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    use_node_folders()
    assert not NODE_FOLDERS.keys() & os.environ.keys()


def test_all_runs_have_one_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # so that it is restored
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    enter_working_folder()
    assert Path.cwd().is_relative_to(tmp_path / "cache")
    os.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    enter_working_folder()
    assert Path.cwd() == tmp_path


def _with_header(content: bytes, **header: str) -> bytes:
    sha256 = hashlib.sha256(content).hexdigest()
    return json.dumps({"torch": torch.__version__, "sha256": sha256} | header).encode() + b"\n" + content


@pytest.mark.parametrize(
    "contents",
    [b"", b"no header", _with_header(b"cut")[:-1], _with_header(b"old", torch="2.0"), _with_header(b"no artifacts")],
    ids=["empty", "text", "cut", "another torch", "another format"],
)
def test_a_damaged_or_foreign_artifact_is_named_and_ignored(folder: RunFolder, contents: bytes) -> None:
    warnings: list[str] = []
    cache = CompileCache(folder, Worker.join(CPU, cpus=1, node=""), warnings.append)
    cache.load()
    assert not warnings  # there is none
    folder.write(cache.file, contents)
    cache.load()
    (warning,) = warnings
    assert f"{folder}/{cache.file}" in warning and "compiled again" in warning


def _compile(folder: RunFolder, node: str) -> dict[str, int]:
    """Compile a model on a node, and return how often Inductor found a graph."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = node
    worker = Worker.join(CPU, cpus=1, node="")
    warnings: list[str] = []
    cache = CompileCache(folder, worker, warnings.append)
    cache.load()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    forward_backward = ForwardBackward(
        model, lambda x: model(x).mean(), worker, Precision("fp32", CPU), micro_batches=worker.world_size, compiled=True
    )
    forward_backward(torch.ones(4, 8))
    cache.save()
    cache.finish()
    assert not warnings
    found: dict[str, int] = torch._dynamo.utils.counters["inductor"]
    return {name: count for name, count in found.items() if name.startswith("fxgraph_cache")}


def _compile_again(folder: RunFolder, node: str) -> None:
    with patch("torch.compiler.load_cache_artifacts", side_effect=AssertionError("the node has them")):
        assert "fxgraph_cache_miss" not in _compile(folder, node)


@pytest.mark.slow
def test_a_second_node_compiles_nothing_again(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    first, _ = run_ranks(2, _compile, folder, str(tmp_path / "first"))
    assert first["fxgraph_cache_miss"] > 0
    (file,) = Path(folder.path(FOLDER)).iterdir()
    written = file.stat().st_mtime_ns
    for found in run_ranks(2, _compile, folder, str(tmp_path / "second")):
        assert found["fxgraph_cache_hit"] > 0 and "fxgraph_cache_miss" not in found
    assert file.stat().st_mtime_ns == written  # nothing new was compiled
    for node in ("first", "second"):
        run_ranks(1, _compile_again, folder, str(tmp_path / node))
    assert file.stat().st_mtime_ns == written


def _train(folder: RunFolder, node: str) -> list[int]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = node
    train(replace(SHORT, epochs=1, compile=True, trace_samples=False, name="run"), digits_data(), LocalSession(folder))
    return [file.stat().st_size for file in Path(folder.path(FOLDER)).iterdir()]


@pytest.mark.slow
def test_a_run_that_compiles_keeps_what_it_has_compiled(tmp_path: Path) -> None:
    ((size,),) = run_ranks(1, _train, folder_of(tmp_path), str(tmp_path / "node"))
    assert size > 1000
