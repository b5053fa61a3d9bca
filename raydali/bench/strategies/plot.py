"""The picture of `raydali bench strategies`."""

from typing import Any

from raydali.bench.common import plots
from raydali.bench.strategies.metrics import GIB, strategy_name


def plot(result: dict[str, Any], path: str) -> None:
    """Draw a result of `bench strategies` as a PNG: a group per strategy, a bar per precision and loader.

    The upper panel shows rates. With GPUs, the lower one shows the memory in use on each: a bar is divided into one per
    GPU, so that an even load has a flat top.

    Args:
        result: as written by `write_json`.
        path: the file.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if not row["error"]]
    groups, kinds = {strategy_name(row) for row in rows}, {_kind(row) for row in rows}
    on_gpus = any(row["memory"] for row in rows)
    size = max(6.4, 1.5 + 0.7 * len(groups) * len(kinds)), 7.6 if on_gpus else 4.6
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(2 if on_gpus else 1, sharex=True, squeeze=False).flat)
    bars = plots.grouped_bars(panels[0], rows, strategy_name, _kind)
    for row, (left, width, color) in zip(rows, bars, strict=True):
        memory = [each["used_bytes"] / GIB for each in row["memory"] or []]
        for gpu, used in enumerate(memory):
            each = width / len(memory)
            x = left + gpu * each
            panels[1].bar(x, used, each, align="edge", color=f"C{color}", edgecolor="white", linewidth=0.4)
    settings = result["settings"]
    pixels = f"{settings['image_size']} x {settings['image_size']} pixels"
    what = f"{settings['model']}, {pixels}, batches of {settings['batch_size']} per GPU"
    plots.title(panels[0], result, what, gpus=settings["gpus"], drawn="whiskers: lowest and highest")
    if on_gpus:
        panels[1].set_ylabel("memory in use, GiB; a bar per GPU")
    for axes in panels:
        axes.margins(y=0.1)
    plots.save(figure, path, columns=len(kinds))


def _kind(row: dict[str, Any]) -> str:
    return f"{row['precision']}, {row['loader']}"
