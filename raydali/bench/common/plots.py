"""Common parts of the pictures of benchmarks: title, groups of bars with whiskers, legend."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUP_WIDTH = 0.84
"""Width of a group of bars; the distance between two groups is 1."""
BAR_WIDTH = 0.92
"""Width of a bar, as a share of its place in the group."""


def title(axes: "Axes", result: dict[str, Any], what: str, *, gpus: int, drawn: str) -> None:
    """Set the two lines of the title: command and workload, then hardware and repeats.

    Args:
        axes: the plot that gets the title.
        result: as written by `write_json`.
        what: the workload.
        gpus: number of GPUs, all of one kind.
        drawn: which values of the repeats are drawn.
    """
    machine = result["machine"]
    hardware = f"{gpus} x {machine['gpus'][0]}, " if gpus else ""
    lines = f"{result['command']}: {what}", f"{hardware}{machine['cpus']} CPU cores; {drawn} of"
    axes.set_title(f"{lines[0]}\n{lines[1]} {result['settings']['repeats']}", fontsize=10)


def grouped_bars(
    axes: "Axes",
    rows: Sequence[dict[str, Any]],
    group: Callable[[dict[str, Any]], Any],
    series: Callable[[dict[str, Any]], str],
    top: float = float("inf"),
) -> list[tuple[float, float, int]]:
    """Draw a bar per row: rates with whiskers from the lowest to the highest repeat.

    Args:
        axes: where they are drawn.
        rows: with "images_per_second", "low" and "high".
        group: the key of a row's group; groups are drawn in order of appearance.
        series: the legend entry of a row.
        top: bars that exceed it are cut off, and their rate is written inside.

    Returns:
        For each row the left edge of its bar, its width and the number of its colour.
    """
    groups = list(dict.fromkeys(map(group, rows)))
    labels = list(dict.fromkeys(map(series, rows)))
    place = GROUP_WIDTH / max(1, len(labels))
    bars = []
    for row in rows:
        i, rate = labels.index(series(row)), row["images_per_second"]
        x = groups.index(group(row)) + (i - (len(labels) - 1) / 2) * place
        fits = row["high"] <= top
        axes.bar(x, rate if fits else top, BAR_WIDTH * place, color=f"C{i}")
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
        bars.append((x - BAR_WIDTH * place / 2, BAR_WIDTH * place, i))
    for i, label in enumerate(labels):
        axes.bar(0, 0, color=f"C{i}", label=label)
    axes.set_xticks(range(len(groups)), list(map(str, groups)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel("images per second")
    return bars


def save(figure: "Figure", path: str, *, columns: int) -> None:
    """Write a picture as a PNG, with a legend below it that has this number of columns."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if columns:
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)
    figure.savefig(Path(path).expanduser(), format="png", dpi=150)
