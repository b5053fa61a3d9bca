"""A job's command: help, parse, check, launch, and end with the right exit code and a readable last line.

0    done, or done before
1    training failed: the worker's own error comes last; Ray did not start; or another driver took over the run
2    bad usage: one line that names the value, the limit and the remedy
130  interrupted
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, make_dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

import tyro

from raydali.data.index.cache import cache_with_runs
from raydali.data.read.storage import refuse_secrets
from raydali.errors import UsageError
from raydali.host import start_clock
from raydali.host.background import Background
from raydali.host.interrupts import end_with_input
from raydali.host.standard_streams import outlive_readers
from raydali.launch.driver.job_file import PLAN, PROGRAM, typed
from raydali.launch.driver.launcher import launch
from raydali.launch.job import Job
from raydali.output import exit_codes, mark_warnings, parse_options
from raydali.report.console import Console
from raydali.training.recipe import find_recipe

Config = TypeVar("Config")

FIRST_OPTIONS = {
    "data": ("data", "val_data", "val_fraction", "fold", "label_column"),
    "model": ("model", "weights", "image_size"),
    "training": ("recipe", "epochs", "batch_size", "global_batch_size", "optimizer", "learning_rate", "augment"),
    "placement": ("workers", "gpu", "no_gpu", "loader", "precision"),
    "results": ("storage", "name", "checkpoint_every"),
}
"""The options that --help shows of those that jobs share, by group."""


def parse(
    config: type[Config],
    args: Sequence[str] | None = None,
    prog: str | None = None,
    *,
    demo: Config | None = None,
    fine_tuning: Config | None = None,
) -> Config:
    """Parse the command line to a config. Indexes of its data are then also kept in its storage.

    Args:
        config: a dataclass; its fields are the options.
        args: the command line. Default: the command line of this process.
        prog: what the user has typed before it.
        demo: the defaults if `--data` is not given, for a job with built-in data; the field `data` is then None.
        fine_tuning: the defaults if `--data` and `--weights` are given.

    With `--recipe`, if the job has this option, the recipe's settings are the defaults instead.

    Raises:
        UsageError: an argument holds a key, or there is no such recipe.
    """
    start_clock.mark("imports")
    mark_warnings()
    args, prog = sys.argv[1:] if args is None else args, prog or os.environ.pop(PROGRAM, f"python {sys.argv[0]}")
    for argument in args:
        refuse_secrets(argument)
    typed[:] = [*prog.split(), *args]
    args = _with_all_shards(args)
    if {"-h", "--help"} & {*args}:
        _show_help(config, prog)
    args = ["--help" if argument == "--help-all" else argument for argument in args]
    recipe = _given_recipe(args) if hasattr(config, "recipe") else None
    if recipe is not None:
        settings = {"recipe": recipe, **find_recipe(recipe).options()}
        try:
            parsed = parse_options(config, args, prog, config(**settings))
        except UsageError as error:
            raise UsageError(f"{error} (--recipe {recipe} sets the options that are not given)") from None
        demo = fine_tuning = None
    else:
        parsed = parse_options(config, args, prog)
    if demo is not None and not getattr(parsed, "data", None):
        parsed = parse_options(config, args, prog, demo)
    elif fine_tuning is not None and getattr(parsed, "weights", None):
        parsed = parse_options(config, args, prog, fine_tuning)
    cache_with_runs(getattr(parsed, "storage", None))
    return parsed


def _given_recipe(args: Sequence[str]) -> str | None:
    """Return the value of `--recipe`, which is needed before other options can be parsed and checked."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe", nargs="?")
    recipe: str | None = parser.parse_known_args(args)[0].recipe
    return recipe


def _show_help(config: type, command: str) -> None:
    """Print the first options of a job's dataclass, and those that no class of raydali has; raises SystemExit."""
    bases = (base for base in config.__mro__ if base.__module__.startswith("raydali."))
    shared = {*chain(*FIRST_OPTIONS.values()), *(option.name for base in bases for option in fields(base))}
    own = [option.name for option in fields(config) if option.name not in shared]
    groups = [(name, _only(config, names)) for name, names in {**FIRST_OPTIONS, "job": own}.items()]
    options = make_dataclass("Options", [group for group in groups if fields(group[1])])
    about = f"{config.__doc__}\n{command} --help-all shows all options."
    style = tyro.conf.DisallowNone, tyro.conf.OmitArgPrefixes
    tyro.cli(options, prog=command, description=about, config=style, args=["--help"])


def _only(config: Any, names: Iterable[str]) -> Any:  # noqa: ANN401 (a dataclass)
    """Return a copy of a dataclass with some of its fields, whose descriptions tyro reads in the same source."""
    kept = {name: config.__dataclass_fields__[name] for name in names if name in config.__dataclass_fields__}
    return type(config.__name__, config.__bases__, {**vars(config), "__dataclass_fields__": kept, "__doc__": ""})


def run_job(job: Job[Any]) -> None:
    """Be the command of a job: parse its options, open its data, and train; see `run_main`."""
    plan_options = json.loads(os.environ.pop(PLAN, "null"))
    if plan_options is not None:  # a run's start has no `raydali plan` before it
        start_clock.begin(plan_options.pop("since"))

    def main() -> None:
        args = _without_auto(sys.argv[1:])
        options = parse(job.config, args, demo=job.demo, fine_tuning=job.fine_tuning)
        if len(args) < len(sys.argv[1:]):
            from raydali.launch.driver.plan import with_largest_batch

            options = with_largest_batch(job, options)
        if plan_options is None:
            launch(job, options, Console())
            return
        from raydali.launch.driver.plan import plan

        plan(job, options, **plan_options)

    run_main(main)


def _with_all_shards(args: Sequence[str]) -> list[str]:
    """Return the command line with the value "all" of `--shard` where it has no number."""
    followed = pairwise([*args, "--"])
    return [*chain(*([name, "all"] if name == "--shard" and after[:2] == "--" else [name] for name, after in followed))]


def _without_auto(args: list[str]) -> list[str]:
    """Return the command line without `--batch-size auto`: the largest size is then found before the run begins."""
    names = "--batch-size", "--batch_size"
    kept = [argument for argument in args if argument not in (f"{name}=auto" for name in names)]
    at = next((at for at, pair in enumerate(pairwise(kept)) if pair[0] in names and pair[1] == "auto"), None)
    return kept if at is None else kept[:at] + kept[at + 2 :]


def run_main(main: Callable[[], None]) -> None:
    """Run a job's main function and leave with its exit code.

    It can import modules in the current folder, as Ray's workers can. It never waits for the readers of its output.
    """
    sys.path.insert(0, str(Path.cwd()))
    outlive_readers(Background("output"))
    end_with_input()
    with exit_codes():
        if PLAN in os.environ:
            raise UsageError(f"{Path(sys.argv[0]).name} has no JOB that raydali could plan: see docs/own-data.md")
        main()
