"""The account of an epoch: for what each worker group that ran a part of it used its seconds.

The parts of a group's seconds add up to them, validation included. "ceiling" is the time that its steps take if their
batch is already on the device; `costs` estimates what else they cost. These estimates may overlap: if they exceed the
time that is left beside the ceiling, they are scaled down to it. What they do not explain is the rest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raydali.measure.costs import LOADER, Rank, contended_node, seconds_by_cause, straggler_of
from raydali.measure.verdict import CAUSES, SHORT_SECONDS, SHORT_STEPS

PART_OF: Mapping[str, str] = {
    "start-up": "starting",
    "compile": "starting",
    **dict.fromkeys(LOADER, "data"),
    "contention": "contention",
    "gpu contention": "contention",
    "slower steps": "contention",
    "communication": "communication",
    "straggler": "stragglers",
    "checkpoint": "checkpoints",
}
"""The part of the ledger that each cause of the verdict belongs to."""


@dataclass(frozen=True, kw_only=True)
class SegmentAccount:
    """The account of one worker group's part of an epoch.

    Attributes:
        group: the id of the group, see `RankRecord.group`.
        world_size: the number of its workers.
        seconds: of one worker, by part; "unmeasured" is training whose ceiling is not known.
        flops: operations of all workers; None if they were not counted.
        peak_flops: operations a second that all devices of the group can do; None if they are not known.
    """

    group: str
    world_size: int
    seconds: dict[str, float]
    flops: float | None
    peak_flops: float | None


def segments(ranks: Sequence[Rank]) -> Iterator[Sequence[Rank]]:
    """Yield the ranks of each worker group that ran a part of an epoch, in order."""
    while ranks:
        size = ranks[0]["world_size"]
        yield ranks[:size]
        ranks = ranks[size:]


def accounts(record: Mapping[str, Any], ceilings: Mapping[int, float]) -> list[SegmentAccount]:
    """Return the account of each worker group that ran a part of an epoch.

    Args:
        record: a row of `epochs.jsonl`; its validation belongs to the last group.
        ceilings: the newest ceiling of each world size, in images a second, for groups of other sizes than the last.
    """
    of_groups = [*segments(record["ranks"])]
    validation = (record.get("validation") or {}).get("seconds") or 0.0
    found = []
    for ranks in of_groups:
        is_last = ranks is of_groups[-1]
        size, images = ranks[0]["world_size"], sum(rank["images"] for rank in ranks)
        ceiling = (record.get("ceiling_images_per_second") if is_last else None) or ceilings.get(size)
        seconds = _split(ranks, images / ceiling if ceiling else None)
        if is_last:
            seconds["validation"] = validation
        flops, peaks = record.get("flops_per_image"), [float(rank.get("peak_flops") or 0.0) for rank in ranks]
        found.append(
            SegmentAccount(
                group=ranks[0].get("group", ""),
                world_size=size,
                seconds={part: spent for part, spent in seconds.items() if spent},
                flops=flops and flops * images,
                peak_flops=sum(peaks) if all(peaks) else None,
            )
        )
    return found


def _split(ranks: Sequence[Rank], at_ceiling: float | None) -> dict[str, float]:
    """Return the seconds of one worker by part, without validation."""
    trained = float(max(rank["seconds"] for rank in ranks))
    ceiling = min(at_ceiling or 0.0, trained)
    parts: dict[str, float] = {}
    try:
        is_long = trained >= SHORT_SECONDS or max(rank["steps"] for rank in ranks) >= SHORT_STEPS
        straggler = straggler_of(ranks, CAUSES["straggler"].blamed_from) if is_long else None
        causes = seconds_by_cause(ranks, straggler, contended_node(ranks)[1], at_ceiling)
    except KeyError:  # an earlier version did not measure all of them
        causes = {}
    for cause, seconds in causes.items():
        parts[PART_OF[cause]] = parts.get(PART_OF[cause], 0.0) + seconds
    own, room = sum(parts.values()), trained - ceiling
    if own > room:
        parts = {part: seconds * room / own for part, seconds in parts.items()}
    rest = "unmeasured" if at_ceiling is None else "rest"
    return {**parts, "ceiling": ceiling, rest: max(0.0, room - own)}
