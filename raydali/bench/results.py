"""What benchmarks have in common: the machine, tables, and results as JSON and as a picture."""

import ctypes
import json
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import tyro

from raydali.errors import UsageError

JsonFile = Annotated[
    str | None, tyro.conf.arg(metavar="FILE", help="File for what was found, as JSON; -: standard output.")
]
"""Type of the option --json of every command; cli.py knows what `-` is."""
VERSIONS = {"raydali": "raydali", "torch": "torch", "dali": "nvidia-dali-cuda120"}
WIDTH_IN_FILES = 200


class BenchFailed(Exception):
    """Something could not be measured; the message says what. What could be was shown and written. Exit code 1."""


def machine() -> dict[str, Any]:
    """What figures depend on: {"cpus", "gpus": names, "python", "raydali", "torch", "dali"}; null: not installed."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "gpus": gpu_names(),
        "python": platform.python_version(),
        **{name: _version(package) for name, package in VERSIONS.items()},
    }


def gpu_names() -> list[str]:
    """The GPUs that CUDA shows this process. Asks the driver alone: torch would take seconds, and a GPU's memory."""
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require_writable(option: str, path: str | None) -> None:
    """Refuse a path that a result could not be written to, before anything is measured.

    Raises:
        UsageError: its folder is missing or not writable, or it is a folder.
    """
    if path is None:
        return
    folder = Path(path).expanduser().absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).expanduser().is_dir():
        raise UsageError(f"{option} {path} cannot be written: give a file in a folder that exists and can be written")


def write_json(result: dict[str, Any], path: str) -> None:
    """Write a result, indented."""
    Path(path).expanduser().write_text(json.dumps(result, indent=2) + "\n")


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table: the first column to the left, the others to the right. In a file no line of it is broken."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_FILES
    console.print(table)


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    """The value in this format, or "-" where it was not measured."""
    return "-" if value is None else f"{value:{form}}{unit}"


def devices(gpus: int) -> str:
    """A number of GPUs in words."""
    return "CPU" if not gpus else f"{gpus} GPU{'s' * (gpus > 1)}"


def plot(result: dict[str, Any], path: str) -> None:
    """Draw a result of `bench loader` as a PNG: a group of bars a number of GPUs, a bar a loader, repeats as whiskers.

    What the synthetic loader hands out is no work: the axis ends above the others, and its figure stands in its bar.

    Args:
        result: as written by `write_json`.
        path: where to.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["images_per_second"] is not None]
    groups = sorted({row["gpus"] for row in rows})
    names = list(dict.fromkeys(row["loader"] for row in rows))
    top = 1.15 * max((row["high"] for row in rows if row["loader"] != "synthetic" or len(names) == 1), default=1)
    figure = Figure(figsize=(max(6.4, 1.5 + 0.8 * len(groups) * len(names)), 4.8), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / max(1, len(names))
    for row in rows:
        i, rate = names.index(row["loader"]), row["images_per_second"]
        x = groups.index(row["gpus"]) + (i - (len(names) - 1) / 2) * width
        fits = row["high"] <= top
        axes.bar(x, rate if fits else top, 0.92 * width, color=f"C{i}")
        if fits:
            axes.errorbar(x, rate, [[rate - row["low"]], [row["high"] - rate]], color="black", capsize=3, linewidth=1)
        axes.annotate(
            f"{rate:,.0f}",
            (x, row["high"] if fits else top),
            xytext=(0, 3 if fits else -6),
            textcoords="offset points",
            ha="center",
            va="bottom" if fits else "top",
            fontsize=8,
            rotation=0 if fits else 90,
        )
    for i, name in enumerate(names):
        axes.bar(0, 0, color=f"C{i}", label=name)
    machine, settings = result["machine"], result["settings"]
    hardware = f"{len(machine['gpus'])} x {machine['gpus'][0]}, " if machine["gpus"] else ""
    axes.set_title(
        f"{result['command']}: {settings['image_size']} x {settings['image_size']} pixels, batches of "
        f"{settings['batch_size']}\n{hardware}{machine['cpus']} CPU cores; whiskers: lowest and highest of "
        f"{settings['repeats']}",
        fontsize=10,
    )
    axes.set_ylim(0, 1.08 * top)
    axes.set_xticks(range(len(groups)), [devices(gpus) for gpus in groups])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("where batches are delivered to")
    axes.set_ylabel("images per second")
    axes.spines[["top", "right"]].set_visible(False)
    if names:
        figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(Path(path).expanduser(), format="png", dpi=150)
