"""A package that is not installed: each job and command that needs it names the packages, before it starts anything."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from raydali.errors import UsageError
from raydali.extras import require_extra
from tests.support.messages import mentioning, mentions

ROOT = Path(__file__).parents[1]
slow = partial(pytest.param, marks=pytest.mark.slow)

WITHOUT = """
import runpy, sys
sys.modules[sys.argv[1]] = None
sys.modules["ray"] = None
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("package", "remedy", "command"),
    [
        ("av", "pip install av", "jobs/video.py"),
        ("av", "pip install av", "raydali/cli.py bench video"),
        slow("faster_coco_eval", "pip install faster-coco-eval", "jobs/detection.py"),
        slow("sklearn", "pip install scikit-learn", "jobs/restoration.py"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(package: str, remedy: str, command: str, tmp_path: Path) -> None:
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, str(ROOT / script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert mentions(done.stderr.splitlines()[-1], f"{package} {remedy}")


@pytest.mark.slow
def test_nothing_warns_without_triton() -> None:
    """Installations without a GPU leave it out."""
    modules = "raydali.inference.engine, raydali.launch.worker.training_run, torch._functorch.aot_autograd"
    code = f"import sys; sys.modules['triton'] = None; import {modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_installed_package_is_not_imported() -> None:
    imported = set(sys.modules)
    require_extra("export", "onnxruntime", "exports")
    assert set(sys.modules) == imported
    with pytest.raises(UsageError, match=mentioning("module nowhere pip install onnx onnxruntime onnxscript")):
        require_extra("export", "nowhere", "exports")
