"""A package that is not installed: each job and command that needs it names the extra, before it starts anything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raydali.errors import UsageError
from raydali.extras import require_extra
from tests.support.messages import mentioning, mentions

ROOT = Path(__file__).parents[1]

WITHOUT = """
import runpy, sys
sys.modules[sys.argv[1]] = None
sys.modules["ray"] = None
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("av", "video", "jobs/video.py"),
        ("av", "video", "raydali/cli.py bench video"),
        ("pycocotools", "detection", "jobs/detection.py"),
        ("sklearn", "demo", "jobs/restoration.py"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(package: str, extra: str, command: str, tmp_path: Path) -> None:
    script, *arguments = command.split()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, package, str(ROOT / script), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert mentions(done.stderr.splitlines()[-1], f"{package} raydali[{extra}]")


def test_an_installed_package_is_not_imported() -> None:
    imported = set(sys.modules)
    require_extra("export", "onnxruntime", "exports")
    assert set(sys.modules) == imported
    with pytest.raises(UsageError, match=mentioning("module nowhere raydali[export]")):
        require_extra("export", "nowhere", "exports")
