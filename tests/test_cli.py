"""The `raydali` command: quick to answer, one help, one way to JSON, completion for shells, and its exit codes."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from raydali import cli
from raydali.bench import loader
from raydali.bench.loader import LoaderBench
from raydali.errors import CommandError, UsageError
from raydali.output import parse_options
from tests.support.messages import mentioning, mentions
from tests.support.pictures import encoded, photograph

HEAVY = {"torch", "ray", "nvidia.dali", "matplotlib", "pyarrow", "numpy"}
ROOT = Path(__file__).parents[1]
RAYDALI = str(Path(sys.executable).with_name("raydali"))
COMMANDS = {
    "": (
        *("bench", "cluster", "completion", "doctor", "evaluate", "export", "new", "predict", "prepare"),
        *("plan", "preview", "replay", "report", "train", "verify"),
    ),
    "bench": ("loader", "strategies", "train", "video"),
    "cluster": ("up", "down", "status"),
}


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([RAYDALI, *arguments], capture_output=True, text=True)


HELP = """
import contextlib, io, json, sys
from raydali import cli
told = {}
for command in sys.argv[1:]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    told[command] = output.getvalue(), sorted({HEAVY} & sys.modules.keys())
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[str, list[str]]]:
    """The help of each command, and the heavy modules that were imported by then."""
    commands = [*COMMANDS, *(f"{group} {name}".strip() for group in COMMANDS for name in COMMANDS[group])]
    done = subprocess.run(
        [sys.executable, "-c", HELP.replace("{HEAVY}", str(HEAVY)), *commands], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, tuple[str, list[str]]] = json.loads(done.stdout)
    return told


@pytest.mark.parametrize("group", COMMANDS)
def test_the_commands_are_these(group: str, helps: dict[str, tuple[str, list[str]]]) -> None:
    found = re.search(r"\{([\w,]+)\}", helps[group][0])
    assert found and set(found[1].split(",")) == set(COMMANDS[group]), helps[group]


def test_help_imports_nothing_heavy(helps: dict[str, tuple[str, list[str]]]) -> None:
    for name, (said, heavy) in helps.items():
        assert "usage: " in said and "{None}" not in said, name
        assert not heavy, name
        if "--json" in said:
            assert "--json FILE" in said, name


def test_help_answers_at_once() -> None:
    """It computes not much more than a start of Python that imports what parses options."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def cpu_seconds(*command: str) -> float:
        before = used()
        subprocess.run(command, capture_output=True, check=True)
        return used() - before

    parser = min(cpu_seconds(sys.executable, "-c", "import tyro") for _ in range(3))
    assert min(cpu_seconds(RAYDALI, "--help") for _ in range(3)) < 5 * parser


@pytest.mark.parametrize(
    "command",
    [[RAYDALI, "train", "imagenet"], pytest.param([sys.executable, "jobs/grid.py"], marks=pytest.mark.slow)],
)
def test_python_without_docstrings_is_refused(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONOPTIMIZE": "2"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert mentions(done.stderr, "error: PYTHONOPTIMIZE=2 1")


def test_version() -> None:
    assert re.fullmatch(r"raydali \d+\.\d+\.\d+\n", run("--version").stdout)


@pytest.mark.slow
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "raydali.bash"
    script.write_text(run("completion", "bash").stdout)
    for words, completed in (
        ("raydali be", "bench"),
        ("raydali tr", "train"),
        ("raydali ne", "new"),
        ("raydali bench loader --im", "--image-size"),
    ):
        count = len(words.split()) - 1
        ask = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={count}; COMP_LINE='{words}'; COMP_POINT={len(words)}"
        ask += '; _tyro_raydali; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True)
        assert done.stdout.split() == [completed], done.stderr


@pytest.mark.parametrize(("shell", "mark"), [("zsh", "#compdef raydali"), ("fish", "complete --no-files")])
def test_other_shells_have_a_script_too(shell: str, mark: str, tmp_path: Path) -> None:
    script = run("completion", shell).stdout
    assert mark in script
    if shutil.which(shell):
        (tmp_path / "script").write_text(script)
        subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


@pytest.mark.slow
def test_a_dash_brings_json_alone_to_standard_output(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(encoded(photograph()))
    printed = run("verify", str(tmp_path), "--json", "-")
    assert printed.returncode == 0, printed.stderr
    assert json.loads(printed.stdout)["samples"] == 1 and "1 sample" in printed.stderr
    kept = run("verify", str(tmp_path), "--json", str(tmp_path / "verify.json"))
    assert "1 sample" in kept.stdout
    assert json.loads((tmp_path / "verify.json").read_text()).keys() == json.loads(printed.stdout).keys()


def test_a_dash_brings_json_of_a_failure_too() -> None:
    """A check that fails ends with 1, what was found is there all the same."""
    done = run("doctor", "--storage", "/proc/none", "--json", "-")
    assert done.returncode == 1 and any(row["status"] == "fail" for row in json.loads(done.stdout)["rows"])
    refused = run("bench", "loader", "--repeats", "0", "--json", "-")
    assert (refused.returncode, refused.stdout) == (2, "") and "error: --repeats" in refused.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (CommandError("no rate"), 1),
        (UsageError("too many"), 2),
        (PermissionError(13, "not permitted", "/proc/1/environ"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def main(options: LoaderBench) -> None:
        seen.append(options)
        if error:
            raise error

    monkeypatch.setattr(loader, "main", main)
    args = ["bench", "loader", "--gpus", "1,2", "--batch-size", "8"]
    if error:
        with pytest.raises(SystemExit) as left:
            cli.main(args)
        assert left.value.code == code
        assert (f"error: {error}" if str(error) else "interrupted") in capsys.readouterr().err
    else:
        cli.main(args)
    assert seen == [LoaderBench(gpus="1,2", batch_size=8)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("verfy x", "verfy raydali verify"),
        ("clustr up", "clustr raydali cluster up"),
        ("trian imagenet", "trian raydali train"),
        ("evaluate x --chekpoint newest", "--chekpoint --checkpoint raydali evaluate --help"),
        ("prepare --sizes 256 a b", "--sizes raydali prepare --help"),
        ("bench loader --stepz 3", "--stepz raydali bench loader --help"),
        ("evaluate x y", "y raydali evaluate --help"),
        ("bench loader --seconds x", "--seconds number 'x'"),
        ("export x --to onx", "--to onnx 'onx'"),
        ("plan imagenet --seconds x", "--seconds number 'x'"),
        ("evaluate", "raydali evaluate --help run"),
        ("bench", "raydali --help loader"),
        ("preview --dta x", "--dta --data raydali preview --help"),
    ],
)
def test_what_is_mistyped_is_named_with_the_nearest(given: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(given.split())
    said = capsys.readouterr().err
    assert end.value.code == 2 and said.count("\n") == 1 and mentions(said, named)


REFUSED = """
import sys
from raydali import cli
for command in sys.argv[1:]:
    try:
        cli.main(command.split())
    except SystemExit as end:
        print(command.split()[0], end, "torch" in sys.modules)
"""


def test_a_refusal_that_needs_no_torch_imports_none(tmp_path: Path) -> None:
    commands = ["evaluate NOWHERE", "predict NOWHERE . -o p.csv", "export NOWHERE", "report NOWHERE", "evalute x"]
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, *commands], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"{command.split()[0]} 2 False" for command in commands], done.stderr


def test_a_plan_begins_its_run_without_torch() -> None:
    """It takes seconds to import, which a run spends while Ray starts: the plan would be of a slower start."""
    code = "import sys, jobs.imagenet, raydali.launch.driver.plan; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


def test_options_that_a_class_names_otherwise_are_taken() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Renamed:
        rate: Annotated[float, tyro.conf.arg(aliases=["--lr"])] = 1.0

    assert parse_options(Renamed, ["--lr", "2"], "job").rate == 2
    with pytest.raises(UsageError, match=mentioning("job --rte --rate")):
        parse_options(Renamed, ["--rte", "2"], "job")
