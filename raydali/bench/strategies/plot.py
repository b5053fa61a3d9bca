"""The picture of `raydali bench strategies`."""

from typing import Any

from raydali.bench.common import plots
from raydali.bench.strategies.metrics import GIB, strategy_name

WIDTH = 0.84
"""Of a group of bars."""


def plot(result: dict[str, Any], path: str) -> None:
    """Draw a result of `bench strategies` as a PNG: a group of bars a strategy, a bar a precision and loader.

    Above the rates, repeats as whiskers; below, where there are GPUs, the memory taken on each: a bar is cut into one a
    GPU, so that an even load has a flat top.

    Args:
        result: as written by `write_json`.
        path: where to.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if not row["error"]]
    groups = list(dict.fromkeys(strategy_name(row) for row in rows))
    kinds = list(dict.fromkeys((row["precision"], row["loader"]) for row in rows))
    on_gpus = any(row["memory"] for row in rows)
    size = max(6.4, 1.5 + 0.7 * len(groups) * len(kinds)), 7.6 if on_gpus else 4.6
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(2 if on_gpus else 1, sharex=True, squeeze=False).flat)
    width = WIDTH / max(1, len(kinds))
    for row in rows:
        kind = kinds.index((row["precision"], row["loader"]))
        x, rate = groups.index(strategy_name(row)) + (kind - (len(kinds) - 1) / 2) * width, row["images_per_second"]
        panels[0].bar(x, rate, 0.92 * width, color=f"C{kind}")
        whiskers = [[rate - row["low"]], [row["high"] - rate]]
        panels[0].errorbar(x, rate, whiskers, color="black", capsize=3, linewidth=1)
        panels[0].annotate(
            f"{rate:,.0f}",
            (x, row["high"]),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
        )
        each = 0.92 * width / len(row["memory"] or [0])
        for gpu, memory in enumerate(row["memory"] or []):
            left = x - 0.46 * width + gpu * each
            height = memory["used_bytes"] / GIB
            panels[-1].bar(left, height, each, align="edge", color=f"C{kind}", edgecolor="white", linewidth=0.4)
    for kind, (precision, loader) in enumerate(kinds):
        panels[0].bar(0, 0, color=f"C{kind}", label=f"{precision}, {loader}")
    settings = result["settings"]
    pixels = f"{settings['image_size']} x {settings['image_size']} pixels"
    what = f"{settings['model']}, {pixels}, batches of {settings['batch_size']} a GPU"
    plots.title(panels[0], result, what, gpus=settings["gpus"], drawn="whiskers: lowest and highest")
    panels[0].set_ylabel("images per second")
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    if on_gpus:
        panels[1].set_ylabel("memory taken, GiB; a bar a GPU")
    panels[-1].set_xticks(range(len(groups)), groups)
    for axes in panels:
        axes.margins(y=0.1)
    plots.save(figure, path, columns=len(kinds))
