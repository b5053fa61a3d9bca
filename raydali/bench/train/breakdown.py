"""The parts of the distance to the ceiling: pure functions of what the ranks measured.

All parts are shares of the time of a step at the ceiling:

    time of a real step = time of a step at the ceiling x (1 + distance)
    distance            = data_values + waiting + contention + unexplained
    contention          = contention_cpu + contention_gpu

They come from segments that were measured one after the other, so noise makes some of them negative.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Round = dict[str, dict[str, float]]
Row = dict[str, Any]
Measured = dict[str, Any]

PARTS = ("data_values", "waiting", "contention_gpu", "contention_cpu", "contention", "unexplained")


def split(rounds: Sequence[Round]) -> dict[str, float | None]:
    """Split the distance into parts, medians over the rounds; null if the segments for a part were not measured.

    distance        of real training
    data_values     the step on real batches kept on the device: what their values cost, compared with noise
    waiting         the device idle for data while training, mean over ranks; what other ranks lose when one of them
                    waits is in `unexplained`
    contention      the step on the resident batch while the loader runs, less the waiting then
    contention_cpu  the same step while the loader decodes on the CPU only, as fast as it can: an upper bound of what
                    the loader's threads cost the training loop
    contention_gpu  the rest of the contention: the GPU's units, memory and queues
    unexplained     the rest of the distance
    """

    def over(name: str) -> list[float]:
        return [each["ceiling"]["images_per_second"] / each[name]["images_per_second"] - 1 for each in rounds]

    def waiting(name: str) -> list[float]:
        extra = over(name)
        return [each[name]["loader_wait_fraction"] * (1 + more) for each, more in zip(rounds, extra, strict=True)]

    parts: dict[str, float | None] = dict.fromkeys(PARTS)
    distance = statistics.median(over("real"))
    parts["waiting"] = waited = statistics.median(waiting("real"))
    if "replay" in rounds[0]:
        parts["data_values"] = values = statistics.median(over("replay"))
        pairs = zip(over("contention"), waiting("contention"), strict=True)
        parts["contention"] = contention = statistics.median(more - wait for more, wait in pairs)
        parts["unexplained"] = distance - values - waited - contention
        if "host_contention" in rounds[0]:
            parts["contention_cpu"] = on_host = statistics.median(over("host_contention"))
            parts["contention_gpu"] = contention - on_host
    return {"distance": distance, **parts}


def _median(name: str, figure: str = "images_per_second") -> Callable[[Measured], float]:
    return lambda measured: statistics.median(each[name][figure] for each in measured["rounds"])


def _of_ceiling(measured: Measured) -> list[float]:
    return [each["real"]["images_per_second"] / each["ceiling"]["images_per_second"] for each in measured["rounds"]]


METRICS: dict[str, Callable[[Measured], Any]] = {
    "ceiling_images_per_second": _median("ceiling"),
    "real_images_per_second": _median("real"),
    "loader_images_per_second": _median("alone"),
    "ceiling_before_images_per_second": lambda measured: measured["ceiling_before"]["images_per_second"],
    "of_ceiling": lambda measured: statistics.median(_of_ceiling(measured)),
    "of_ceiling_low": lambda measured: min(_of_ceiling(measured)),
    "of_ceiling_high": lambda measured: max(_of_ceiling(measured)),
    "loader_wait_fraction": _median("real", "loader_wait_fraction"),
    "host_wait_fraction": _median("real", "host_wait_fraction"),
    "split": lambda measured: split(measured["rounds"]),
    "rounds": lambda measured: measured["rounds"],
}
"""Metrics of a row, computed from what rank 0 returns: rates in images per second over all GPUs, medians of the rounds.
The fractions are shares of the time in which the device, or the host, waited for data."""


def against_one_gpu(row: Row, rows: Iterable[Row]) -> dict[str, float | None]:
    """Compare a row with the same model and loader on one GPU; null if that was not measured.

    Returns:
        "scaling": the ratio of the rates of real training. "communication": the share of the ceiling that the GPUs lose
        together, compared with as many single ones; mostly in the all-reduce.
    """
    same = (row["model"], row["loader"], 1, None)
    one = next((each for each in rows if (each["model"], each["loader"], each["gpus"], each["error"]) == same), None)
    if one is None or row["error"] is not None or not row["gpus"]:
        return {"scaling": None, "communication": None}
    together = row["ceiling_images_per_second"] / (row["gpus"] * one["ceiling_images_per_second"])
    return {
        "scaling": row["real_images_per_second"] / one["real_images_per_second"],
        "communication": 1 - together,
    }
