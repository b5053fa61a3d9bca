"""Runs the `raydali` command: parses its command line and dispatches to a subcommand.

A subcommand is a dataclass of options with a function `main(options)` in the same module. Neither this module nor
those import torch, Ray or DALI, so that --help answers at once.

0    done
1    a command or a check failed; the last line names it
2    bad usage: one line that names the value, the limit and the remedy
130  interrupted
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro
from tyro.extras import SubcommandApp

from raydali.bench.goodput.command import GoodputBench
from raydali.bench.loader.command import LoaderBench
from raydali.bench.scale.command import ScaleBench
from raydali.bench.soak import SoakBench
from raydali.bench.strategies.command import StrategiesBench
from raydali.bench.train.command import TrainBench
from raydali.bench.video.command import VideoBench
from raydali.commands.chaos.command import Chaos
from raydali.commands.doctor.command import Doctor
from raydali.commands.evaluate import Evaluate
from raydali.commands.export import Export
from raydali.commands.local_cluster.command import Down, Status, Up
from raydali.commands.new import New
from raydali.commands.predict import Predict
from raydali.commands.prepare import Prepare
from raydali.commands.preview import Preview
from raydali.commands.report import Report
from raydali.commands.train import Train
from raydali.commands.verify import Verify
from raydali.data.sources.storage import refuse_secrets
from raydali.errors import CommandError, DataError, StorageAway, UsageError
from raydali.output import mark_warnings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DESCRIPTION = """Train models; measure and check the data, the machines and the runs.

Exit codes: 0 done, 1 something failed or a check did, 2 bad usage, 130 interrupted."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Print a script that completes raydali's commands and options in bash, zsh or fish."""

    shell: tyro.conf.Positional[Literal["bash", "zsh", "fish"]]
    """The shell."""


def main(args: Sequence[str] | None = None) -> None:
    """Parse the command line, run the subcommand and leave with its exit code."""
    given = sys.argv[1:] if args is None else list(args)
    mark_warnings()
    if given == ["--version"]:
        from importlib.metadata import version

        print(f"raydali {version('raydali')}")
        return None
    try:
        for argument in given:
            refuse_secrets(argument)
        options = _parse(given)
        if isinstance(options, Completion):  # tyro makes the script from the same dataclasses as the help
            return main(["--tyro-print-completion", options.shell])
        run: Callable[[Any], object] = sys.modules[type(options).__module__].main
        if getattr(options, "json", None) == "-":
            _print_json(run, options)
        else:
            run(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (CommandError, DataError, StorageAway) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _parse(given: list[str]) -> "DataclassInstance":
    if given[:1] == ["train"] and given[1:] not in (["-h"], ["--help"]):  # the other options are the job's
        return Train(job=tuple(given[1:]))
    style = (tyro.conf.DisallowNone,)
    if given[:1] == ["preview"]:  # so are its other options
        known = tyro.cli(Preview, prog="raydali preview", args=given[1:], config=style, return_unknown_args=True)
        return replace(known[0], of_job=tuple(known[1]))
    options: DataclassInstance = _commands().cli(prog="raydali", description=DESCRIPTION, args=given, config=style)
    return options


def _print_json(run: Callable[[Any], object], options: "DataclassInstance") -> None:
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
    bench = SubcommandApp()
    bench.command(name="goodput")(GoodputBench)
    bench.command(name="loader")(LoaderBench)
    bench.command(name="scale")(ScaleBench)
    bench.command(name="soak")(SoakBench)
    bench.command(name="strategies")(StrategiesBench)
    bench.command(name="train")(TrainBench)
    bench.command(name="video")(VideoBench)
    app = SubcommandApp()
    app.command(bench, name="bench", help="Measure loaders and training.")
    app.command(name="chaos")(Chaos)
    cluster = SubcommandApp()
    cluster.command(name="up")(Up)
    cluster.command(name="down")(Down)
    cluster.command(name="status")(Status)
    app.command(cluster, name="cluster", help="An autoscaling cluster on this machine alone, for trying things.")
    app.command(name="completion")(Completion)
    app.command(name="doctor")(Doctor)
    app.command(name="evaluate")(Evaluate)
    app.command(name="export")(Export)
    app.command(name="new")(New)
    app.command(name="predict")(Predict)
    app.command(name="prepare")(Prepare)
    app.command(name="preview")(Preview)
    app.command(name="report")(Report)
    app.command(name="train")(Train)
    app.command(name="verify")(Verify)
    return app


if __name__ == "__main__":
    main()
