"""Options and commands that earlier versions had. Each is refused with a sentence that says what replaced it.

To remove an option or a command, delete it and add a row to `REMOVED`. A row has no effect while the option or the
command still exists, or where a job defines an option of this name itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from raydali.errors import UsageError

_IN_PLACE = (
    "a run restarts from its newest checkpoint when a worker dies, and --checkpoint-every sets how many steps are "
    "done again"
)
_NOT_INSTALLED = "it is a test now: run it in a checkout of raydali by"

REMOVED: dict[str, str] = {
    "--replace": _IN_PLACE,
    "--spares": _IN_PLACE,
    "--plot": "--json FILE has all figures, for any program that draws",
    "bench loader --limit": "--repeats sets the number of measurements, and the command says how long they take",
    "bench loader --seed-table": f"{_NOT_INSTALLED} python -m tests.support.published_table",
    "bench video --seed-table": "its options are --make 173 --batch-size 8 --sequence-length 30 --threads 8",
    "bench train --split": "it measures the ceiling, training and the loader; a profiler shows where the rest goes",
    "chaos": f"{_NOT_INSTALLED} make chaos",
    "bench goodput": "it compared ways to recover, and a restart from the newest checkpoint is the only one left",
    "bench scale": "its figures are in docs/scale.md, and they follow from the formats of the run's files",
    "bench soak": f"{_NOT_INSTALLED} python -m tests.support.soak",
}
"""Each value says what replaced an option or a command, and ends the message of one line.

Keys: `--option` of jobs and of all commands, also for --no-option; `command --option` of one command; or a command.
"""


def refuse_removed_options(args: Iterable[str], options: type[Any], command: str = "") -> None:
    """Refuse a command line with an option that was removed.

    Args:
        args: the command line.
        options: the dataclass that it is parsed to; what has a field there was not removed.
        command: the name of a command of raydali, such as `bench train`; empty for a job.

    Raises:
        UsageError: names the option and what replaced it.
    """
    existing = {each.name.replace("_", "-") for each in fields(options)}
    for argument in args:
        given = argument.partition("=")[0].replace("_", "-")
        if not given.startswith("--"):
            continue
        names = given.removeprefix("--"), given.removeprefix("--").removeprefix("no-")
        if existing & {*names}:
            continue
        for key in (f"{prefix}--{name}" for name in names for prefix in (f"{command} ", "")):
            if key in REMOVED:
                raise UsageError(f"{given} was removed: {REMOVED[key]}")


def refuse_removed_command(args: Sequence[str], commands: Iterable[str]) -> None:
    """Refuse a command line that begins with a command that was removed.

    Args:
        args: the command line after `raydali`.
        commands: those that exist.

    Raises:
        UsageError: names the command and what replaced it.
    """
    for name in (" ".join(args[:1]), " ".join(args[:2])):
        if name in REMOVED and name not in commands:
            raise UsageError(f"raydali {name} was removed: {REMOVED[name]}")
