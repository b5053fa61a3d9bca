"""The picture of `raydali bench loader`."""

from typing import Any

from raydali.bench.common import plots
from raydali.bench.common.results import contender_name
from raydali.output import devices


def plot(result: dict[str, Any], path: str) -> None:
    """Draw a result of `bench loader` as a PNG: a group per number of GPUs, a bar per loader.

    The synthetic loader does no work: the axis ends above the others, and its rate is written inside its bar.

    Args:
        result: as written by `write_json`.
        path: the file.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if row["images_per_second"] is not None]
    rows.sort(key=lambda row: row["gpus"])
    groups, names = ({function(row) for row in rows} for function in (lambda row: row["gpus"], contender_name))
    top = 1.15 * max((row["high"] for row in rows if row["loader"] != "synthetic" or len(names) == 1), default=1)
    figure = Figure(figsize=(max(6.4, 1.5 + 0.8 * len(groups) * len(names)), 4.8), layout="constrained")
    axes = figure.subplots()
    plots.grouped_bars(axes, rows, lambda row: devices(row["gpus"]), contender_name, top)
    size, batch_size = result["settings"]["image_size"], result["settings"]["batch_size"]
    what = f"{size} x {size} pixels, batches of {batch_size}"
    plots.title(axes, result, what, gpus=len(result["machine"]["gpus"]), drawn="whiskers: lowest and highest")
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlabel("device that batches are delivered to")
    plots.save(figure, path, columns=len(names))
