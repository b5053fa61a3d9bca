""".github/: its workflows run targets that the Makefile has, on the versions of Python that raydali supports."""

import os
import re
import subprocess
import tomllib
from typing import Any

import pytest
import yaml

from tests.support.cluster import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github/actions").glob("*/action.yml"))


def jobs() -> dict[str, Any]:
    """Every job of every workflow, by file and name."""
    return {
        f"{path.stem}/{name}": job
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    }


@pytest.mark.parametrize("path", [*WORKFLOWS, *ACTIONS], ids=lambda path: path.stem)
def test_commands_and_actions_exist(path: Any) -> None:
    text = path.read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"\bmake ([\w-]+)", text):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for action in re.findall(r"uses: (\S+)", text):
        assert (ROOT / action).exists() if action.startswith("./") else re.search(r"@v\d+$", action), action


@pytest.mark.parametrize("name", ["test/test", "wheel/install"])
def test_all_supported_versions_of_python_are_tested(name: str) -> None:
    lowest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    versions = jobs()[name]["strategy"]["matrix"]["python-version"]
    assert versions[0] == lowest and all(isinstance(version, str) for version in versions)


def test_a_release_has_notes() -> None:
    """The workflow's own command finds the section of the present version in the changelog, and no other section."""
    (step,) = [step for step in jobs()["release/release"]["steps"] if "awk " in step.get("run", "")]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    command = step["run"].replace("> notes.md", "").replace("test -s notes.md", "")
    environment = os.environ | {"GITHUB_REF_NAME": f"v{version}"}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "### " in done.stdout and "\n## " not in done.stdout, done.stderr


def test_no_job_can_run_for_ever() -> None:
    assert all("timeout-minutes" in job or "uses" in job for job in jobs().values())
