"""What the pictures of benchmarks have in common: above, what was measured and on what; below, the legend."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def title(axes: "Axes", result: dict[str, Any], what: str, *, gpus: int, drawn: str) -> None:
    """The two lines above a picture.

    Args:
        result: as written by `write_json`.
        what: was measured.
        gpus: how many were used, all of one kind.
        drawn: of the repeats.
    """
    machine = result["machine"]
    hardware = f"{gpus} x {machine['gpus'][0]}, " if gpus else ""
    lines = f"{result['command']}: {what}", f"{hardware}{machine['cpus']} CPU cores; {drawn} of"
    axes.set_title(f"{lines[0]}\n{lines[1]} {result['settings']['repeats']}", fontsize=10)


def save(figure: "Figure", path: str, *, columns: int) -> None:
    """Write a picture as a PNG, with a legend of so many columns."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if columns:
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(Path(path).expanduser(), format="png", dpi=150)
