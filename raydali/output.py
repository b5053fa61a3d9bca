"""Output that the commands of `raydali` share: --json, tables, ends of logs, and the description of the machine."""

import ctypes
import difflib
import json
import logging
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import fields
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any, TypeVar, cast

import tyro

from raydali.errors import RaydaliError, UsageError
from raydali.host.cpu_times import usable_cores
from raydali.host.facts import version
from raydali.text import plural, printable

Options = TypeVar("Options")
JsonFile = Annotated[
    str | None, tyro.conf.arg(metavar="FILE", help="File for the result, as JSON; -: standard output.")
]
"""Type of the option --json of every command; cli.py handles `-`."""
VERSIONS = {"raydali": "raydali", "torch": "torch", "dali": "nvidia-dali-cuda120"}
WIDTH_IN_FILES = 200


def mark_warnings() -> None:
    """Print log warnings on standard error, prefixed with "warning: ", unless a handler takes them."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Printable("warning: %(message)s"))


class _Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), lines=True)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Print an error of the `with` block on standard error, and leave with its exit code."""
    try:
        if sys.flags.optimize > 1:
            raise UsageError("PYTHONOPTIMIZE=2 (python -OO) removes docstrings that Ray Train and DALI need: give 1")
        yield
    except RaydaliError as error:
        for line in [*getattr(error, "__notes__", []), f"error: {error}"]:
            print(printable(line, lines=True), file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except PermissionError as error:  # such as the file of another user's run
        print(printable(f"error: {error}; change its rights, or give another path"), file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        print(str(interrupt) or "interrupted", file=sys.stderr)
        sys.exit(130)


def machine() -> dict[str, Any]:
    """Describe this machine: {"cpus", "gpus": names, "python", "raydali", "torch", "dali"}; null: not installed."""
    return {
        "cpus": usable_cores(),
        "gpus": gpu_names(),
        "python": platform.python_version(),
        **{name: version(package) or None for name, package in VERSIONS.items()},
    }


def gpu_names() -> list[str]:
    """The GPUs that CUDA shows this process, which NVML does not know: it ignores CUDA_VISIBLE_DEVICES.

    Asks only the driver: torch would take seconds, and a GPU's memory.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    names = []
    for i in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(128)
        cuda.cuDeviceGet(ctypes.byref(device), i)
        cuda.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode())
    return names


def require_writable(option: str, path: str | None) -> None:
    """Refuse a path that a result could not be written to, before anything is measured.

    Raises:
        UsageError: its folder is missing or not writable, or it is a folder.
    """
    if path is None:
        return
    file = Path(path).expanduser().absolute()
    try:
        with TemporaryFile(dir=file.parent):  # what rights permit is not all: /proc takes no files
            writable = not file.is_dir()
    except OSError:
        writable = False
    if not writable:
        raise UsageError(f"{option} {path} cannot be written: give a file in a folder that can be written")


def write_output(path: str, content: bytes) -> None:
    """Write the file that --output names.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        Path(path).expanduser().write_bytes(content)
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}; give another file") from error


def require_there(option: str, path: str | None) -> None:
    """Refuse a local path that does not exist, before anything is imported that takes seconds; patterns pass.

    Raises:
        UsageError: naming the option and the path.
    """
    if path is None or "://" in path or {*"*?[{"} & {*path} or Path(path).expanduser().exists():
        return
    raise UsageError(f"{option} {path} does not exist: give another path")


def write_json(result: dict[str, Any], path: str) -> None:
    """Write a result as indented JSON."""
    Path(path).expanduser().write_text(json.dumps(result, indent=2) + "\n")


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: the first column left-aligned, the others right-aligned. In a file no line is wrapped."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES
    console.print(table)


def devices(gpus: int) -> str:
    """The device of a benchmark: "CPU", "1 GPU", "4 GPUs"."""
    return plural(gpus, "GPU") if gpus else "CPU"


def log_tail(log: Path, lines: int = 15) -> str:
    """Return the last lines of a log, which may be missing."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""


def parse_options(options: type[Options], args: Sequence[str], prog: str, default: Options | None = None) -> Options:
    """Parse a command line to a dataclass, whose fields are the options.

    Raises:
        UsageError: an argument is none of the options, and the nearest of them are named; or a value is none of an
            option's.
    """
    names = [f"--{option.name.replace('_', '-')}" for option in fields(options)]  # type: ignore[arg-type]
    of_tyro: dict[str, Any] = {} if default is None else {"default": default}
    style = (tyro.conf.DisallowNone,)
    try:
        with one_sentence(prog):
            parsed, stray = tyro.cli(options, prog=prog, args=args, config=style, return_unknown_args=True, **of_tyro)
    except UsageError:
        allowed = {"--help", *names, *(f"--no-{name[2:]}" for name in names)}
        named = (word.partition("=")[0].replace("_", "-") for word in args if word.startswith("--"))
        stray = [word for word in named if word not in allowed]
        if not stray:
            raise
    if not stray:
        return cast(Options, parsed)
    word = stray[0].partition("=")[0]
    if not word.startswith("-"):
        raise UsageError(f"{prog} takes no argument {word}: {prog} --help lists what it takes")
    near = difflib.get_close_matches(word, names, n=2, cutoff=0.6)
    instead = f"try {' or '.join(near)}; " if near else ""
    raise UsageError(f"{prog} has no option {word}: {instead}{prog} --help lists its options")


@contextmanager
def one_sentence(prog: str) -> Iterator[None]:
    """Raise a UsageError of one line in place of the box with which tyro refuses arguments."""
    box = StringIO()
    try:
        with redirect_stderr(box):
            yield
    except SystemExit as stopped:
        if not stopped.code:
            raise
        raise UsageError(_sentence(box.getvalue(), prog)) from None


def _sentence(box: str, prog: str) -> str:
    """Return what a box of tyro says: a title, a text and hints, with rulers between them."""
    parts = (" ".join(part.split()) for part in re.split("[─-]{3,}", re.sub("[│╭╮╰╯]", " ", box)))
    _, text, *_ = [*parts, ""]
    if choice := re.match(r"invalid choice (.+) for argument '(.+)'\. Expected one of \((.+)\)", text):
        choices = sorted({*re.findall(r"'(.+?)'", choice[3])} - {"None"})
        return f"{choice[2]} must be one of {', '.join(choices)}, not {choice[1]}"
    if wrong := re.match(r"Error parsing (?:\S+/)?(--\S+): .*(int\(\)|could not convert).*: ('.*')$", text):
        return f"{wrong[1]} must be {'a whole number' if 'int' in wrong[2] else 'a number'}, not {wrong[3]}"
    text = re.sub(r"Missing value for argument '(.+)'\. Expected 1 values\.", r"\1 needs a value", text)
    text = re.sub(r"\bSTR |\.? \(required\)", "", text.replace(f"Missing from {prog}:", f"{prog} needs:"))
    return f"{text.rstrip('.')}: {prog} --help lists what it takes"
