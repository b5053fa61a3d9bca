"""The picture of `raydali bench goodput`: the step over time, a line for each contender, a dot for each kill."""

from bisect import bisect_left
from typing import Any

from raydali.bench.common import plots
from raydali.bench.goodput.options import CHOICE


def plot(result: dict[str, Any], path: str) -> None:
    """Draw a result of `bench goodput` as a PNG.

    Args:
        result: as written by `write_json`.
        path: the file.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if not row["error"]]
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        times, steps = zip(*row["progress"], strict=True)
        (line,) = axes.plot(times, steps, label=CHOICE[row["contender"]], linewidth=1.4)
        before = [steps[max(0, bisect_left(times, kill) - 1)] for kill in row["kills"]]
        axes.plot(row["kills"], before, "o", color=line.get_color(), markersize=4)
    settings = result["settings"]
    what = f"{settings['workers']} ranks, a kill about every {settings['kill_every']:g} s (dots)"
    axes.set_title(f"{result['command']}: {what}, {result['machine']['cpus']} CPU cores", fontsize=10)
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("finished steps")
    plots.save(figure, path, columns=min(3, len(rows)))
