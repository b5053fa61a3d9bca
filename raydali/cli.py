"""Runs the `raydali` command: parses its command line and dispatches to a subcommand.

A subcommand is a dataclass of options with a function `main(options)` in the same module. Neither this module nor
those import torch, Ray or DALI, so that --help answers at once.

0    done
1    a command or a check failed; the last line names it
2    bad usage: one line that names the value, the limit and the remedy
130  interrupted
"""

import difflib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from tyro.extras import SubcommandApp

from raydali.bench.loader import LoaderBench
from raydali.bench.strategies import StrategiesBench
from raydali.bench.train import TrainBench
from raydali.bench.video import VideoBench
from raydali.commands.cluster import Down, Status, Up
from raydali.commands.doctor import Doctor
from raydali.commands.evaluate import Evaluate
from raydali.commands.export import Export
from raydali.commands.jobs import New, Plan, Train
from raydali.commands.predict import Predict
from raydali.commands.prepare import Prepare
from raydali.commands.preview import Preview
from raydali.commands.replay import Replay
from raydali.commands.report import Report
from raydali.commands.verify import Verify
from raydali.data.read.storage import refuse_secrets
from raydali.errors import UsageError
from raydali.host.facts import version
from raydali.host.standard_streams import outlive_readers
from raydali.options.inference import WAIT_POLICY, InferenceOptions
from raydali.output import exit_codes, mark_warnings, one_sentence, parse_options

DESCRIPTION = """Train models; measure and check the data, the machines and the runs.

Exit codes: 0 done, 1 something failed or a check did, 2 bad usage, 130 interrupted."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes raydali's commands and options in bash, zsh or fish."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def _by_name(*commands: type, group: str = "") -> dict[str, type[Any]]:
    return {f"{group}{command.__name__.removesuffix('Bench').lower()}": command for command in commands}


BENCHES = LoaderBench, StrategiesBench, TrainBench, VideoBench
COMMANDS = {
    **_by_name(*BENCHES, group="bench "),
    **_by_name(Up, Down, Status, group="cluster "),
    **_by_name(
        Completion, Doctor, Evaluate, Export, New, Plan, Predict, Prepare, Preview, Replay, Report, Train, Verify
    ),
}
"""The options of each command, by what the user types."""


def main(args: Sequence[str] | None = None) -> None:
    """Parse the command line, run the subcommand and leave with its exit code."""
    words = sys.argv[1:] if args is None else list(args)
    outlive_readers()
    mark_warnings()
    if words == ["--version"]:
        print(f"raydali {version('raydali')}")
        return
    with exit_codes():
        for argument in words:
            refuse_secrets(argument)
        options = _parse(words)
        if isinstance(options, Completion):  # tyro makes the script from the same dataclasses as the help
            main(["--tyro-print-completion", options.shell])
            return
        if isinstance(options, InferenceOptions):
            os.environ.setdefault(*WAIT_POLICY)
        run: Callable[[Any], object] = sys.modules[type(options).__module__].main
        if getattr(options, "json", None) == "-" and not isinstance(options, Plan):  # whose job prints it
            _print_json(run, options)
        else:
            run(options)


def _parse(words: list[str]) -> Any:  # noqa: ANN401 (the dataclass of a command)
    count = 2 if words[:1] in (["bench"], ["cluster"]) else 1
    name, rest, style = " ".join(words[:count]), words[count:], (tyro.conf.DisallowNone,)
    if name == "train" and rest not in (["-h"], ["--help"]):  # the other options are the job's
        return Train(job=tuple(rest))
    if name in ("plan", "preview") and not {"-h", "--help"} & {*rest}:  # so are their other options
        with one_sentence(prog := f"raydali {name}"):
            own, of_job = tyro.cli(COMMANDS[name], prog=prog, args=rest, config=style, return_unknown_args=True)
        return replace(own, of_job=tuple(of_job))
    if name in COMMANDS:
        return parse_options(COMMANDS[name], rest, f"raydali {name}")
    if len(words) >= count and not words[count - 1].startswith("-"):
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.6)
        instead = f"try raydali {near[0]}" if near else "raydali --help lists all"
        raise UsageError(f"raydali has no command {name}: {instead}")
    with one_sentence("raydali"):
        return _commands().cli(prog="raydali", description=DESCRIPTION, args=words, config=style)


def _print_json(run: Callable[[Any], object], options: Any) -> None:  # noqa: ANN401 (the dataclass of a command)
    """Run a command with its JSON on standard output and everything else on standard error."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.json")
        try:
            with redirect_stdout(sys.stderr):
                run(replace(options, json=str(file)))
        finally:
            if file.exists():
                print(file.read_text(), end="")


def _commands() -> SubcommandApp:
    """Return all commands, for the help of `raydali` itself and the completion of shells."""
    app, groups = SubcommandApp(), {"bench": SubcommandApp(), "cluster": SubcommandApp()}
    app.command(groups["bench"], name="bench", help="Measure loaders and training.")
    about = "An autoscaling cluster on this machine alone, for trying things."
    app.command(groups["cluster"], name="cluster", help=about)
    for name, command in COMMANDS.items():
        group, _, of_group = name.partition(" ")
        (groups[group] if of_group else app).command(name=of_group or name)(command)
    return app


if __name__ == "__main__":
    main()
