"""The picture of `raydali bench train`."""

from typing import Any

from raydali.bench.common import plots
from raydali.output import devices
from raydali.text import number

STACKED = {
    "contention_gpu": "contention on the GPU",
    "contention_cpu": "contention on the CPU",
    "contention": "contention",
    "waiting": "waiting for data",
    "data_values": "values of the data",
    "unexplained": "unexplained",
}
"""Parts that `breakdown.split` computes, from below, and their names; contention replaces its two halves."""


def plot(result: dict[str, Any], path: str) -> None:
    """Draw a result of `bench train` as a PNG: a bar per model, loader and number of GPUs.

    A bar is the time of a real step: at the bottom the share of the same step at the ceiling, which is the ratio of the
    two rates, and above it the parts of the rest. Parts that noise made negative are left out, and the others are
    scaled down so that the bar adds up to one.

    Args:
        result: as written by `write_json`.
        path: the file.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    rows = [row for row in result["rows"] if not row["error"]]
    figure = Figure(figsize=(max(6.4, 2.5 + 1.3 * len(rows)), 5.2), layout="constrained")
    axes = figure.subplots()
    colours = {part: f"C{i + 1}" for i, part in enumerate(STACKED)}
    for x, row in enumerate(rows):
        axes.bar(x, min(1.0, row["of_ceiling"]), 0.7, color="C0")
        bottom = row["of_ceiling"]
        for part, height in lost(row).items():
            axes.bar(x, height, 0.7, bottom, color=colours[part])
            bottom += height
        rates = f"{number(row['real_images_per_second'])}\nof {number(row['ceiling_images_per_second'])}\nimages/s"
        axes.text(x, 0.02, f"{row['of_ceiling']:.3f}\n\n{rates}", ha="center", va="bottom", color="white", fontsize=9)
    axes.bar(0, 0, color="C0", label="the step at its ceiling")
    for part in [part for part in STACKED if any(part in lost(row) for row in rows)]:
        axes.bar(0, 0, color=colours[part], label=STACKED[part])
    settings = result["settings"]
    pixels = f"{settings['image_size']} x {settings['image_size']} pixels"
    what = f"{pixels}, batches of {settings['batch_size']}, {settings['precision']}"
    plots.title(axes, result, what, gpus=len(result["machine"]["gpus"]), drawn="medians")
    axes.set_xticks(range(len(rows)), [f"{row['model']}\n{row['loader']}\n{devices(row['gpus'])}" for row in rows])
    axes.set_ylim(0, max([1.0, *(row["of_ceiling"] for row in rows)]) * 1.03)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("share of the time of a real step")
    plots.save(figure, path, columns=3)


def lost(row: dict[str, Any]) -> dict[str, float]:
    """Return the heights of the parts above a row's ceiling, which add up to 1 with it; empty at the ceiling."""
    parts = {name: value for name in STACKED if (value := row["split"][name]) is not None and value > 0}
    if row["split"]["contention_cpu"] is not None:
        parts.pop("contention", None)
    missing, total = 1 - row["of_ceiling"], sum(parts.values())
    if missing <= 0:
        return {}
    if row["split"]["unexplained"] is None:  # only the waiting was measured
        waiting = min(missing, row["split"]["waiting"] * row["of_ceiling"])
        return {"waiting": waiting, "unexplained": missing - waiting}
    return {name: missing * value / total for name, value in parts.items()}
