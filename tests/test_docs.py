"""The documentation: it builds without a warning, its links lead somewhere, and the commands in it are such."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import tyro
import yaml

from jobs.imagenet import Config
from raydali.cli import _parse
from raydali.commands.jobs import Plan
from raydali.commands.preview import Preview
from raydali.data.stream.stream import Stream
from raydali.launch.driver.job_file import find_job
from tests.support.cluster import ROOT
from tests.test_cli import COMMANDS

LINE_LENGTH = 100
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def text_of(page: Path) -> str:
    """Without blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_prose_are_short(name: str) -> None:
    prose = [line for line in text_of(ROOT / name).splitlines() if not line.startswith(("|", "#", "!"))]
    assert [line for line in prose if len(line) > LINE_LENGTH and " " in line[:LINE_LENGTH].lstrip()] == []


def commands(page: Path) -> list[str]:
    """The lines that a user is to type."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("name", NAMES)
def test_commands_can_be_parsed(name: str) -> None:
    for command in commands(ROOT / name):
        words = shlex.split(re.split(r" [|>] ", command)[0])
        if words[:2] == ["raydali", "train"]:
            config = import_module(f"jobs.{words[2]}").Config if words[2].isidentifier() else Config
            tyro.cli(config, args=words[3:], config=(tyro.conf.DisallowNone,))
        elif "cluster/slurm.sh" in words:
            job, *options = words[words.index("cluster/slurm.sh") + 1 :]
            assert find_job(job).exists()
            tyro.cli(Config, args=options, config=(tyro.conf.DisallowNone,))
        elif words[0] == "raydali" and words[-1] not in ("--help", "--version"):
            parsed = _parse(words[1:])
            if isinstance(parsed, Plan | Preview):
                tyro.cli(Config, args=parsed.of_job, config=(tyro.conf.DisallowNone,))
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        elif "jobs/imagenet.py" in words and words[-1] != "--help":
            tyro.cli(Config, args=words[words.index("jobs/imagenet.py") + 1 :], config=(tyro.conf.DisallowNone,))


@pytest.mark.parametrize("name", NAMES)
def test_raydali_is_installed_from_a_wheel_or_a_clone(name: str) -> None:
    """It is in no registry, where anybody may take its name."""
    assert re.findall(r"pip install .*?(?<![\w/.-])raydali(?![\w-]).*", (ROOT / name).read_text()) == []


def test_every_file_that_uses_internals_of_ray_is_listed() -> None:
    page = (ROOT / "docs/decisions/ray-internals.md").read_text()
    for path in (ROOT / "raydali").rglob("*.py"):
        if re.search(r"\bray\.(_|.*\._(internal|private))", path.read_text()):
            assert f"](../../{path.relative_to(ROOT)})" in page, path


def test_every_command_is_described() -> None:
    cli = (ROOT / "docs/cli.md").read_text()
    for command in COMMANDS[""]:
        below = COMMANDS.get(command, ("",))
        listed = re.findall(rf"^\| (`raydali {command}\b.*?) \|", cli, re.MULTILINE)
        assert all(any(name in row for row in listed) for name in below) and listed, command


def test_every_exit_code_is_described() -> None:
    assert re.findall(r"^\| (\d+) \|", (ROOT / "docs/cli.md").read_text(), re.MULTILINE) == ["0", "1", "2", "130"]


def test_the_example_of_a_loop_stands_on_its_page() -> None:
    code = (ROOT / "docs/examples/ray_train.py").read_text()
    assert f"```python\n{code}```\n" in (ROOT / "docs/own-loop.md").read_text()


def test_the_drawn_stream_is_the_stream() -> None:
    drawn = [int(id) for id in re.findall(r'class="id"[^>]*>(\d+)<', (ROOT / "docs/stream.svg").read_text())]
    stream = Stream(samples=11, epochs=2, batch_size=2, global_batch_size=4, seed=0)
    ids = [i for step in range(stream.steps) for index in (0, 1) for i in stream.micro_batch(step, index).ids.tolist()]
    assert drawn[:20] == ids
    assert sorted(drawn[:11]) == sorted(drawn[11:]) == [*range(11)]
    assert [stream.end_step(epoch) for epoch in (0, 1)] == [3, 5]


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.stem: page.read_text() for page in (tmp_path / "site").glob("*.html")}
    assert {page.stem for page in DOCS} <= {page.stem for page in (tmp_path / "site").rglob("*.html")}
    for name, page in pages.items():
        fetched = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?(https?:[^\" >]+)", page)
        fetched += re.findall(
            r"<link[^>]* rel=\"?(?:stylesheet|icon|preconnect)\"?[^>]* href=\"?(https?:[^\" >]+)", page
        )
        assert not fetched, name
        assert 'href="../' not in page, name  # out of the site
    assert "samples_consumed" in pages["api"] and 'id="raydali.data.stream.stream.Stream"' in pages["api"]


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\n## {version} - " in (ROOT / "CHANGELOG.md").read_text()
    assert f"raydali-{version}-py3-none-any.whl" in (ROOT / "docs/quick-start.md").read_text()
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["cff-version"], citation["version"], citation["license"]) == ("1.2.0", version, "Apache-2.0")
    assert "Apache License" in (ROOT / "LICENSE").read_text()[:100]
    files = ("Dockerfile", "aws.yaml", "gcp.yaml", "kuberay/base/kustomization.yaml")
    tags = {tag for name in files for tag in re.findall(r"([\d.]+)-ray2", (ROOT / "cluster" / name).read_text())}
    assert tags == {version}
