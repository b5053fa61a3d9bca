"""The picture of `raydali bench loader`."""

from typing import Any

from raydali.bench.common import plots
from raydali.bench.common.results import contender
from raydali.output import devices


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
    names = list(dict.fromkeys(contender(row) for row in rows))
    top = 1.15 * max((row["high"] for row in rows if row["loader"] != "synthetic" or len(names) == 1), default=1)
    figure = Figure(figsize=(max(6.4, 1.5 + 0.8 * len(groups) * len(names)), 4.8), layout="constrained")
    axes = figure.subplots()
    width = 0.84 / max(1, len(names))
    for row in rows:
        i, rate = names.index(contender(row)), row["images_per_second"]
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
    settings = result["settings"]
    what = f"{settings['image_size']} x {settings['image_size']} pixels, batches of {settings['batch_size']}"
    plots.title(axes, result, what, gpus=len(result["machine"]["gpus"]), drawn="whiskers: lowest and highest")
    axes.set_ylim(0, 1.08 * top)
    axes.set_xticks(range(len(groups)), [devices(gpus) for gpus in groups])
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("where batches are delivered to")
    axes.set_ylabel("images per second")
    plots.save(figure, path, columns=len(names))
