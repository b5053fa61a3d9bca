"""Where the distance to the ceiling goes: pure functions on what the ranks measured.

All parts are shares of the time that a step takes at the ceiling, so that

    time of a real step = time of a step at the ceiling x (1 + distance)
    distance            = data_values + waiting + contention + unexplained
    contention          = contention_cpu + contention_gpu

They come from stretches that were measured one after the other: noise makes some of them negative, which they stay.
"""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

Round = dict[str, dict[str, float]]
Row = dict[str, Any]

PARTS = ("data_values", "waiting", "contention_gpu", "contention_cpu", "contention", "unexplained")


def split(rounds: Sequence[Round]) -> dict[str, float | None]:
    """The parts of the distance, medians over the rounds; null where the stretches for it were not measured.

    distance        of real training
    data_values     the step on real batches kept on the device: what it costs that they are no noise
    waiting         the device idle for data while training, mean over ranks; what the others lose when one rank
                    waits, is in `unexplained`
    contention      the step on the resident batch with the loader running beside it, less the waiting then
    contention_cpu  the same step while the loader decodes on the CPU alone, as fast as it can: no less than what
                    the loader's threads cost the training loop's
    contention_gpu  the rest of the contention: the GPU's units, its memory, its queues
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


def figures(measured: dict[str, Any]) -> Row:
    """What a row says of one combination; rates in images a second over all GPUs, medians over the rounds."""
    rounds: list[Round] = measured["rounds"]

    def median(name: str, figure: str = "images_per_second") -> float:
        return statistics.median(each[name][figure] for each in rounds)

    ratios = [each["real"]["images_per_second"] / each["ceiling"]["images_per_second"] for each in rounds]
    return {
        "ceiling_images_per_second": median("ceiling"),
        "real_images_per_second": median("real"),
        "loader_images_per_second": median("alone"),
        "ceiling_before_images_per_second": measured["ceiling_before"]["images_per_second"],
        "of_ceiling": statistics.median(ratios),
        "of_ceiling_low": min(ratios),
        "of_ceiling_high": max(ratios),
        "loader_wait_fraction": median("real", "loader_wait_fraction"),
        "host_wait_fraction": median("real", "host_wait_fraction"),
        "split": split(rounds),
        "rounds": rounds,
    }


NOTHING: Row = dict.fromkeys(
    (
        "ceiling_images_per_second",
        "real_images_per_second",
        "loader_images_per_second",
        "ceiling_before_images_per_second",
        "of_ceiling",
        "of_ceiling_low",
        "of_ceiling_high",
        "loader_wait_fraction",
        "host_wait_fraction",
        "split",
        "rounds",
    )
)
"""The figures of a combination that could not be measured."""


def against_one_gpu(row: Row, rows: Iterable[Row]) -> dict[str, float | None]:
    """ "scaling": real training against the same on one GPU; "communication": the share of the ceiling of so many
    GPUs, each as fast as one alone, that they lose together, in the exchange of gradients for the most part. Null
    where one GPU alone was not measured."""
    same = (row["model"], row["loader"], 1, None)
    one = next((each for each in rows if (each["model"], each["loader"], each["gpus"], each["error"]) == same), None)
    if one is None or row["error"] is not None or not row["gpus"]:
        return {"scaling": None, "communication": None}
    together = row["ceiling_images_per_second"] / (row["gpus"] * one["ceiling_images_per_second"])
    return {
        "scaling": row["real_images_per_second"] / one["real_images_per_second"],
        "communication": 1 - together,
    }
