"""The ledger of a run: for what its workers were held, over all its starts; `ledger.json` in the run's folder.

    held = ceiling + data + contention + communication + stragglers + validation + checkpoints
           + starting + restarting + again + unmeasured + rest + open              in seconds of workers

A worker is held from the time at which its group is placed to the end of the group. What a group did after its start
comes from the records of the epochs, as far as a checkpoint covers it. If the group ended without a checkpoint, the
remaining time is that of steps which are done again, and of the wait until the loss was found. The time before workers
were placed, and the time without a driver, stand beside it: nobody trains then, and no worker is held.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from raydali.measure.account import SegmentAccount, accounts

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
FIRST_BATCH, FIRST_STEP = "first batch", "first step"
"""The last phases of a start, which belong to the first epoch."""
MOST_UNMEASURED = 0.01
"""Share of the held time without a ceiling from which on goodput is not known."""


def group_id(driver: str, number: str) -> str:
    """Return the id of a worker group: of its driver's attempt, and of its number there."""
    return f"{driver[:8]}-{number}"


@dataclass(kw_only=True)
class Held:
    """A worker group, and the time for which it held its workers. Times are in seconds since 1970.

    Attributes:
        group: its id: the driver's, and the number of the group.
        workers: how many it has.
        placed: when it got its places.
        waited: seconds before that in which no worker was held, since the driver or the previous group.
        restarts: whether its driver had a group before.
        released: when it ended; None if it has not, or if its driver died.
        begun: when its training began, after its warm-up steps; None before its first step is complete.
        phases: seconds of each phase of its start until then.
        measured: seconds in which the ceiling was measured after that.
        saved: whether a checkpoint covers all of its steps.
        joules: energy of its GPUs; None if it is not measured.
    """

    group: str
    workers: int
    placed: float
    waited: float = 0.0
    restarts: bool = False
    released: float | None = None
    begun: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    measured: float = 0.0
    saved: bool = False
    joules: float | None = None

    def start(self, at: float, phases: Mapping[str, float]) -> None:
        """Note that its first step was complete at this time, after these phases."""
        self.begun = max(self.placed, at - phases.get(FIRST_BATCH, 0.0) - phases.get(FIRST_STEP, 0.0))
        own, whole = dict[str, float](), self.begun - self.placed
        for phase, seconds in reversed([*phases.items()]):  # those before its places belong to the driver
            if phase not in (FIRST_BATCH, FIRST_STEP) and whole > 0:
                own[phase] = round(min(seconds, whole), 3)
                whole -= seconds
        if whole > 0:
            own["workers"] = round(own.get("workers", 0.0) + whole, 3)
        self.phases = dict(reversed([*own.items()]))


class Ledger:
    """The worker groups of a run, and the accounts of what they did.

    Args:
        groups: as an earlier driver has written them.

    Attributes:
        groups: the worker groups, oldest first.
    """

    def __init__(self, groups: Iterable[Mapping[str, Any]] = ()) -> None:
        known = {each.name for each in fields(Held)}
        self.groups = [Held(**{name: value for name, value in row.items() if name in known}) for row in groups]
        self._ceilings: dict[int, float] = {}  # the newest of each world size, in images a second
        self._accounts: list[tuple[int, list[SegmentAccount]]] = []
        self._without_ceiling: dict[int, Mapping[str, Any]] = {}  # records by the index of their accounts

    def add_epoch(self, record: Mapping[str, Any]) -> None:
        """Add a row of `epochs.jsonl`; rows of later steps are dropped, since they will be trained again."""
        self.take_back(record["step"] - 1)
        if ceiling := record.get("ceiling_images_per_second"):
            self.add_ceiling(record["world_size"], ceiling)
        found = accounts(record, self._ceilings)
        if any("unmeasured" in each.seconds for each in found):
            self._without_ceiling[len(self._accounts)] = record
        self._accounts.append((record["step"], found))

    def add_ceiling(self, world_size: int, ceiling: float) -> None:
        """Take a ceiling in images a second; it holds for earlier epochs for which none could be measured, too."""
        self._ceilings[world_size] = ceiling
        for index, record in self._without_ceiling.items():
            self._accounts[index] = record["step"], accounts(record, self._ceilings)

    def take_back(self, step: int) -> None:
        """Drop the accounts of later steps, which will be trained again."""
        while self._accounts and self._accounts[-1][0] > step:
            self._accounts.pop()
            self._without_ceiling.pop(len(self._accounts), None)

    def summary(self, now: float, price: float | None = None) -> dict[str, Any]:
        """Return the contents of `ledger.json`.

        Args:
            now: the time, in seconds since 1970.
            price: of a worker's hour, in USD; None: the run's cost is not known.
        """
        parts, recorded = defaultdict[str, float](float), defaultdict[str, float](float)
        starting = {kind: defaultdict[str, float](float) for kind in ("starting", "restarting")}
        flops, peaks = 0.0, dict[str, float]()
        is_counted = True
        for each in (each for _, of_epoch in self._accounts for each in of_epoch):
            is_counted = is_counted and each.flops is not None and each.peak_flops is not None
            flops, peaks[each.group] = flops + (each.flops or 0.0), each.peak_flops or 0.0
            for part, seconds in each.seconds.items():
                kind = self._kind(each.group) if part == "starting" else part
                parts[kind] += seconds * each.world_size
                if kind in starting:
                    starting[kind]["first batch and step"] += seconds * each.world_size
                recorded[each.group] += seconds * each.world_size
        held = waited = wall = possible = 0.0
        for group in self.groups:
            seconds = ((group.released or now) - group.placed) * group.workers
            kind, begun = self._kind(group.group), group.begun
            start = seconds if begun is None else (begun - group.placed + group.measured) * group.workers
            phases = {"failed": seconds / group.workers} if begun is None else group.phases
            for phase, took in [*phases.items(), ("ceiling", group.measured)]:
                starting[kind][phase] += took * group.workers
            parts[kind] += start
            left = "open" if group.released is None else "rest" if group.saved else "again"
            parts[left] += max(0.0, seconds - start - recorded[group.group])
            held, waited, wall = held + seconds, waited + group.waited, wall + seconds / group.workers
            possible += seconds * (peaks.get(group.group, 0.0) or max(peaks.values(), default=0.0)) / group.workers
        since = self.groups[0].placed - self.groups[0].waited if self.groups else now
        until = max((group.released or now for group in self.groups), default=now)
        joules = [group.joules for group in self.groups]
        closed = held - parts["open"]
        is_measured = closed > 0 and parts["unmeasured"] <= MOST_UNMEASURED * closed
        return {
            "since": round(since, 3),
            "until": round(until, 3),
            "seconds": {
                "held": round(wall, 3),
                "before_placement": round(waited, 3),
                "without_driver": round(max(0.0, until - since - wall - waited), 3),
            },
            "worker_seconds": {"held": round(held, 3), **{part: round(parts[part], 3) for part in PARTS}},
            **{kind: {phase: round(each, 3) for phase, each in of.items()} for kind, of in starting.items()},
            "goodput": round(parts["ceiling"] / closed, 4) if is_measured else None,
            "mfu": round(flops / possible, 4) if flops and possible and is_counted else None,
            "kwh": None if None in joules or not joules else round(sum(filter(None, joules)) / 3.6e6, 6),
            "price_usd_per_gpu_hour": price,
            "cost_usd": None if price is None else round(held / 3600 * price, 6),
            "groups": [asdict(group) for group in self.groups],
        }

    def _kind(self, id: str) -> str:
        restarts = next((group.restarts for group in self.groups if group.group == id), False)
        return "restarting" if restarts else "starting"


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
    """Return what the time gave and cost, as far as it is known."""
    figures = [
        f"goodput {summary['goodput']:.1%}" if summary["goodput"] is not None else "goodput not measured",
        f"MFU {summary['mfu']:.1%}" if summary["mfu"] is not None else "",
        f"{summary['kwh']:.3g} kWh" if summary["kwh"] is not None else "",
        f"${summary['cost_usd']:.2f} at ${summary['price_usd_per_gpu_hour']:g} an hour"
        if summary["cost_usd"] is not None
        else "",
    ]
    return ", ".join(filter(None, figures))
