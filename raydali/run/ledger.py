"""Accounts for the time of a run's workers, over all its starts, in `ledger.json` of the run's folder.

    held = ceiling + data + contention + communication + stragglers + validation + checkpoints
           + starting + restarting + again + unmeasured + rest + open              in seconds of workers

A worker is held from the time at which its group is placed to the end of the group. What a group did after its start
comes from the records of the epochs, as far as a checkpoint covers it. If the group ended without a checkpoint, the
remaining time went to steps which are done again, and to the wait until the loss was found. The time before workers
were placed, and the time without a driver, stand beside it: nobody trains then, and no worker is held.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from raydali.measure.costs import LOADER

LEDGER = "ledger.json"
PARTS: Mapping[str, str] = {
    "ceiling": "training at the ceiling",
    "data": "waiting for data",
    "contention": "contention",
    "communication": "communication",
    "stragglers": "stragglers",
    "validation": "validation",
    "checkpoints": "checkpoints",
    "starting": "starting",
    "restarting": "restarting",
    "again": "steps done again",
    "unmeasured": "training without a ceiling",
    "rest": "the rest",
    "open": "the open epoch",
}
"""The parts of the time for which workers were held, with their names."""
PART_OF_CAUSE: Mapping[str, str] = {
    **dict.fromkeys(("start-up", "compile"), "starting"),
    **dict.fromkeys(LOADER, "data"),
    **dict.fromkeys(("contention", "gpu contention", "slower steps"), "contention"),
    "communication": "communication",
    "straggler": "stragglers",
    "checkpoint": "checkpoints",
}
"""The part that each cause of the verdict belongs to, besides the validation."""
IN_FIRST_EPOCH = "first batch", "first step"
"""The last phases of a start, which belong to the first epoch."""
MOST_UNMEASURED = 0.01
"""Share of the held time: if more of it lacks a ceiling, goodput is not known; if more lacks operations, MFU."""


def group_id(driver: str, number: str) -> str:
    """Return the id of a worker group: of its driver's attempt, and of its number there."""
    return f"{driver[:8]}-{number}"


@dataclass(kw_only=True)
class Held:
    """A worker group, and the time for which it held its workers. Times are in seconds since 1970.

    Attributes:
        group: its id.
        workers: how many it has.
        sharded_over: over how many of them the model is sharded; 1: each has the whole.
        placed: when it got its places.
        waited: seconds before `placed` in which no worker was held, since the driver or the previous group began.
        restarts: whether its driver had a group before.
        released: when it ended; None if it has not, or if its driver died.
        begun: when its training began, after its warm-up steps; None before its first step is complete.
        phases: seconds of each phase of its start until then.
        measured: seconds in which the ceiling was measured after that.
        saved: whether a checkpoint covers all of its steps.
        joules, joules_begun: energy of its GPUs, and until its training began; None if it is not measured.
    """

    group: str
    workers: int
    placed: float
    sharded_over: int = 1
    waited: float = 0.0
    restarts: bool = False
    released: float | None = None
    begun: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    measured: float = 0.0
    saved: bool = False
    joules: float | None = None
    joules_begun: float | None = None

    def start(self, at: float, phases: Mapping[str, float]) -> None:
        """Note that its first step was complete at this time, after these phases; the first ones are the driver's."""
        self.begun = max(self.placed, at - sum(phases.get(phase, 0.0) for phase in IN_FIRST_EPOCH))
        self.joules_begun = self.joules
        names = [*phases]
        own = names[names.index("workers") + 1 :] if "workers" in names else names
        self.phases = {phase: phases[phase] for phase in own if phase not in IN_FIRST_EPOCH}
        self.phases["workers"] = max(0.0, self.begun - self.placed - sum(self.phases.values()))


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What the ledger needs of the part of an epoch that one worker group ran.

    Attributes:
        step: number of completed steps of the run at the epoch's end.
        group, world_size, images, seconds: of the group; see `RankRecord`.
        ceiling: in images a second; None if the epoch has none.
        costs: share of each cause in the whole time; only of the last group of an epoch.
        validation: seconds of the validation, likewise.
        flops, peak_flops: operations that were done, and those that a device can do in a second; 0: not known.
    """

    step: int
    group: str
    world_size: int
    images: int
    seconds: float
    ceiling: float | None
    costs: Mapping[str, float]
    validation: float
    flops: float
    peak_flops: float

    def parts(self, ceiling: float | None) -> dict[str, float]:
        """Return the seconds of a worker by part, which add up to the segment's seconds.

        Estimates of costs may overlap: if they exceed the time beside the ceiling, they are scaled down to it.

        Args:
            ceiling: the run's newest one for that many workers, if the epoch has none.
        """
        rate = self.ceiling or ceiling
        at_ceiling = min(self.images / rate, self.seconds) if rate else 0.0
        parts = dict.fromkeys(PART_OF_CAUSE.values(), 0.0)
        for cause, share in self.costs.items():
            if cause in PART_OF_CAUSE:
                parts[PART_OF_CAUSE[cause]] += share * (self.seconds + self.validation)
        explained, room = sum(parts.values()), self.seconds - at_ceiling
        if explained > room:
            parts = {part: seconds * room / explained for part, seconds in parts.items()}
        rest = "rest" if rate else "unmeasured"
        return {**parts, rest: max(0.0, room - explained), "ceiling": at_ceiling, "validation": self.validation}


def segments(record: Mapping[str, Any]) -> Iterator[Segment]:
    """Yield the part of each worker group in a row of `epochs.jsonl`, in order."""
    ranks, validation = record["ranks"], (record.get("validation") or {}).get("seconds") or 0.0
    while ranks:
        size = ranks[0]["world_size"]
        group, ranks = ranks[:size], ranks[size:]
        images = sum(rank["images"] for rank in group)
        yield Segment(
            step=record["step"],
            group=group[0].get("group", ""),
            world_size=size,
            images=images,
            seconds=max(rank["seconds"] for rank in group),
            ceiling=None if ranks else record.get("ceiling_images_per_second"),
            costs={} if ranks else record.get("costs") or {},
            validation=0.0 if ranks else validation,
            flops=(record.get("flops_per_image") or 0.0) * images,
            peak_flops=group[0].get("peak_flops") or 0.0,
        )


class Ledger:
    """The worker groups of a run, and the epochs that they trained.

    Args:
        groups: as an earlier driver has written them.

    Attributes:
        groups: the worker groups, oldest first.
        ceilings: the newest ceiling of each number of workers, in images a second.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]] = ()) -> None:
        names = {field.name for field in fields(Held)}
        self.groups = [Held(**{name: value for name, value in row.items() if name in names}) for row in groups]
        self.ceilings: dict[int, float] = {}
        self._segments: list[Segment] = []

    def add_epoch(self, record: Mapping[str, Any]) -> None:
        """Add a row of `epochs.jsonl`; rows of later steps are dropped, since they will be trained again."""
        self.take_back(record["step"] - 1)
        self._segments += segments(record)
        if ceiling := self._segments[-1].ceiling:
            self.ceilings[self._segments[-1].world_size] = ceiling

    def take_back(self, step: int) -> None:
        """Drop the epochs that end after this step, which will be trained again."""
        self._segments = [segment for segment in self._segments if segment.step <= step]

    def _ceiling_of(self, segment: Segment) -> float | None:
        return segment.ceiling or self.ceilings.get(segment.world_size)

    def _have(self, figure: Callable[[Segment], float | None], seconds: float) -> bool:
        """Return whether segments have this figure, but for a small share of so many seconds of workers."""
        lacking = sum(segment.seconds * segment.world_size for segment in self._segments if not figure(segment))
        return bool(self._segments) and seconds > 0 and lacking <= MOST_UNMEASURED * seconds

    def summary(self, now: float, price: float | None = None) -> dict[str, Any]:
        """Return the contents of `ledger.json`.

        Args:
            now: the time, in seconds since 1970.
            price: of a worker's hour, in USD; None: the run's cost is not known.
        """
        parts, recorded = defaultdict[str, float](float), defaultdict[str, float](float)
        stages = {kind: defaultdict[str, float](float) for kind in ("starting", "restarting")}
        kinds = {group.group: "restarting" if group.restarts else "starting" for group in self.groups}
        for segment in self._segments:
            for part, seconds in segment.parts(self._ceiling_of(segment)).items():
                kind = kinds.get(segment.group, part) if part == "starting" else part
                parts[kind] += seconds * segment.world_size
                recorded[segment.group] += seconds * segment.world_size
                if kind in stages:
                    stages[kind]["first batch and step"] += seconds * segment.world_size
        held = wall = 0.0
        for group in self.groups:
            kind, lasted = kinds[group.group], (group.released or now) - group.placed
            # A driver that died may not have written that its group had begun.
            failed = max(0.0, lasted - recorded[group.group] / group.workers)
            start = failed if group.begun is None else group.begun - group.placed + group.measured
            for phase, seconds in ({"failed": failed} if group.begun is None else group.phases).items():
                stages[kind][phase] += seconds * group.workers
            stages[kind]["ceiling"] += group.measured * group.workers
            parts[kind] += start * group.workers
            part = "open" if group.released is None else "rest" if group.saved else "again"
            parts[part] += max(0.0, (lasted - start) * group.workers - recorded[group.group])
            held, wall = held + lasted * group.workers, wall + lasted
        closed, waited = held - parts["open"], sum(group.waited for group in self.groups)
        since = self.groups[0].placed - self.groups[0].waited if self.groups else now
        until = max((group.released or now for group in self.groups), default=now)
        counted = [group for group in self.groups if group.joules is not None]
        covered = sum(((group.released or now) - group.placed) * group.workers for group in counted)
        flops = sum(segment.flops for segment in self._segments)
        peak = max((segment.peak_flops for segment in self._segments), default=0.0)
        has_flops = self._have(lambda segment: segment.flops, closed)
        return {
            "since": round(since, 3),
            "until": round(until, 3),
            "seconds": {
                "held": round(wall, 3),
                "before_placement": round(waited, 3),
                "without_driver": round(max(0.0, until - since - wall - waited), 3),
            },
            "worker_seconds": {"held": round(held, 3), **{part: round(parts[part], 3) for part in PARTS}},
            **{kind: {stage: round(spent, 3) for stage, spent in of.items()} for kind, of in stages.items()},
            "goodput": round(parts["ceiling"] / closed, 4) if self._have(self._ceiling_of, closed) else None,
            "mfu": round(flops / (peak * held), 4) if peak and has_flops else None,
            "kwh": round(sum(group.joules or 0.0 for group in counted) / 3.6e6, 6) if counted else None,
            "kwh_share": round(covered / held, 4) if held and counted else None,
            "price_usd_per_gpu_hour": price,
            "cost_usd": None if price is None else round(held / 3600 * price, 6),
            "groups": [asdict(group) for group in self.groups],
        }


def parts_of(summary: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Return key, name and share of each part of the held time that is not zero, as `ledger.json` has them."""
    seconds: Mapping[str, float] = summary["worker_seconds"]
    held = seconds["held"] or 1.0
    return [(part, name, seconds[part] / held) for part, name in PARTS.items() if seconds.get(part)]


def describe(summary: Mapping[str, Any]) -> list[str]:
    """Return two lines on the ledger: what the time went to, and what it gave and cost."""
    hours = summary["worker_seconds"]["held"] / 3600
    parts = sorted(parts_of(summary), key=lambda part: -part[2])
    shares = ", ".join(f"{name} {share:.1%}" for _, name, share in parts if share >= 0.0005)
    return [f"workers were held for {hours:.3g} hours: {shares}", figures_of(summary)]


def figures_of(summary: Mapping[str, Any]) -> str:
    """Return what the time gave and cost, and name what was not measured."""
    goodput, mfu, cost = (summary[name] for name in ("goodput", "mfu", "cost_usd"))
    measured = {
        "goodput": None if goodput is None else f"goodput {goodput:.1%}",
        "MFU": None if mfu is None else f"MFU {mfu:.1%}",
        "kWh": energy_of(summary),
    }
    figures = [text for text in measured.values() if text is not None]
    figures += [] if cost is None else [f"${cost:.2f} at ${summary['price_usd_per_gpu_hour']:g} an hour"]
    shards = sorted({group.get("sharded_over", 1) for group in summary["groups"]} - {1})
    figures += [f"sharded over {' and '.join(map(str, shards))} workers"] if shards else []
    missing = [name for name, text in measured.items() if text is None]
    return ", ".join([*figures, *([f"not measured: {', '.join(missing)}"] if missing else [])])


def energy_of(summary: Mapping[str, Any]) -> str | None:
    """Return the energy in kWh, and for which share of the time it was measured if not for all; None: for none."""
    kwh, share = summary.get("kwh"), summary.get("kwh_share")
    if kwh is None:
        return None
    return f"{kwh:.3g} kWh" + (f" (measured for {share:.1%} of the time)" if share is not None and share < 1 else "")
