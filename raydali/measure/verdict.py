"""The verdict: what an epoch's time was lost to, read from its line of `epochs.jsonl`; docs/verdict.md explains it.

An epoch is the time of its slowest rank, and its validation behind it. What training itself needs is known from the
ceiling: the same steps with their batch on the device already. The rest is shared out among causes, each second once:

    start-up        up to the first batch of the last worker
    compile         from there to the end of the last worker's first step, beyond what others take
    straggler       what one rank, waiting for its loader or stepping, took longer than the median of the others
    storage, python, cpu decode, gpu decode, loader
                    waiting for the loader, on the other ranks, by what held it up; `loader` where it cannot tell
    python          steps longer than at the ceiling too, by as much as the loader's Python ran beside them: of all
                    threads, one at a time runs Python
    communication   what an exchange of gradients takes even when no rank is late
    contention      waiting for a core
    gpu contention  steps longer than at the ceiling, on a GPU: the loader is in their way
    slower steps    on a CPU, steps longer than at the ceiling though they had their cores
    validation, checkpoint
                    a checkpoint as long as it holds up the first rank, for which the others then wait
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from raydali.measure.verdict_text import Finding, said

Kind = Literal[
    "step-bound",
    "loader-bound",
    "straggler",
    "communication",
    "contention",
    "gpu contention",
    "slower steps",
    "start-up",
    "compile",
    "validation",
    "checkpoint",
    "short epochs",
]

ON_CORES = ("python", "cpu decode")
LOADER = ("storage", "python", "cpu decode", "gpu decode", "loader")
BLAMED_FROM: dict[Kind, float] = {
    "loader-bound": 0.1,
    "straggler": 0.15,
    "communication": 0.2,
    "contention": 0.15,
    "gpu contention": 0.15,
    "slower steps": 0.3,
    "start-up": 0.2,
    "compile": 0.2,
    "validation": 0.25,
    "checkpoint": 0.1,
    "short epochs": 0.3,
}
"""The share of an epoch that a cause must cost to be named: some of each is as it should be."""
SHORT_STEPS, SHORT_SECONDS = 10, 10.0
"""With fewer steps in less time, an epoch is mostly what each one costs however long it is."""
SATURATED_IDLE = 0.15
"""Cores that idle less than that share of the time are all taken."""

Rank = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do about an epoch's time.

    Attributes:
        kind: the largest cost, or "step-bound" where none is large.
        cause: of "loader-bound" one of LOADER, else the kind.
        costs: share of the epoch, validation included, that each cause costs; those of 0 are left out.
        gain: how much faster epochs would be without the named cost, 0.5 for half as fast again.
        words: all of it as a sentence, the kind up to the first colon, with a remedy that can be tried.
    """

    kind: Kind
    cause: str
    costs: dict[str, float]
    gain: float
    words: str

    def __str__(self) -> str:
        return self.words


def verdict(
    line: Mapping[str, Any], options: Any = None, useful_block: Callable[[], int] = lambda: 0
) -> Verdict | None:
    """The verdict on an epoch, or None where nothing was trained.

    Args:
        line: of `epochs.jsonl`. Of an epoch that several worker groups ran, the last one's ranks are looked at.
        options: of the job, a dataclass: what remedies are chosen from. None: there are none.
        useful_block: what `shuffle_block` these data can be shuffled in; 0: none.
    """
    ranks: Sequence[Rank] = line["ranks"][-line["world_size"] :]
    images = sum(rank["images"] for rank in ranks)
    validation = (line["validation"] or {}).get("seconds") or 0.0
    trained = max(rank["seconds"] for rank in ranks)
    whole = trained + validation
    if not images or not trained:
        return None

    straggler, lost, by_loader = _straggler(ranks)
    others = [rank for rank in ranks if rank is not straggler]
    host, taken = foreign_share(ranks)
    ceiling = line["ceiling_images_per_second"]
    seconds = {
        **_by_cause(ranks, others, lost, taken, images / ceiling if ceiling else None),
        "straggler": lost,
        "validation": validation,
    }
    costs = {cause: round(min(1.0, cost / whole), 4) for cause, cost in seconds.items() if cost / whole >= 0.00005}
    kind, cause, cost = _largest(costs, ranks, whole)
    gain = cost / (1 - cost) if cost < 1 else 0.0
    finding = Finding(
        kind=kind,
        cause=cause,
        cost=cost,
        gain=gain,
        steps=max(rank["steps"] for rank in ranks),
        seconds=whole,
        of_ceiling=line["of_ceiling"],
        ranks=len(ranks),
        straggler=straggler,
        waits=(_waited(straggler), median(map(_waited, others))) if straggler is not None and by_loader else None,
        host=host,
        taken=taken,
        idle=_idle_share(ranks),
        device=ranks[0]["device"],
        has_bf16=all(rank.get("has_bf16", False) for rank in ranks),
        options=options,
        useful_block=useful_block,
    )
    return Verdict(kind=kind, cause=cause, costs=costs, gain=round(gain, 4), words=said(finding))


def _by_cause(
    ranks: Sequence[Rank], others: Sequence[Rank], lost: float, taken: float, at_ceiling: float | None
) -> dict[str, float]:
    """The seconds of an epoch that each cause cost, but for a straggler and validation.

    Args:
        others: all ranks but the straggler.
        lost: what that one cost.
        taken: the share that other processes have of what is computed.
        at_ceiling: what the same steps take there.
    """
    exchanging = _exchanging(ranks)
    begun, started, saved = max(map(_begun, ranks)), max(map(_first_batch, ranks)), max(map(_saving, ranks))
    # For these the others wait in an exchange. What they wait there beside: ranks that are late in turn, for whatever.
    known = fmean(begun - _begun(rank) + saved - _saving(rank) for rank in others)
    waiting = max(0.0, _mean(others, "exchange_seconds") - exchanging - lost)
    if all(rank["exchange_seconds"] is not None for rank in others):
        known = min(known, waiting)
    late = max(0.0, waiting - known)
    # What is longer than at the ceiling, or was waited for.
    stepped = _mean(others, "step_seconds") - fmean(map(_compiling, others)) - lost - late - known
    slowed = max(0.0, stepped - at_ceiling) if at_ceiling is not None else 0.0
    waits = _waits(others)
    in_python = waits.get("python", 0.0)
    beside = min(slowed, max(0.0, _mean(others, "python_seconds") - in_python))
    waits["python"] = in_python + beside
    slowed -= beside
    # One rank's wait makes each of the others wait as long, at most.
    lateness = min(late / (sum(waits.values()) + slowed or 1.0), len(others) - 1)
    waits = {cause: seconds * (1 + lateness) for cause, seconds in waits.items()}
    return {
        "start-up": started,
        "compile": begun - started,
        "communication": exchanging,
        **_for_want_of_cores(others, waits, slowed * (1 + lateness), taken),
        "checkpoint": saved,
    }


def _largest(costs: Mapping[str, float], ranks: Sequence[Rank], whole: float) -> tuple[Kind, str, float]:
    """The kind to be named, its cause, and what it costs."""
    of: dict[Kind, float] = {
        "loader-bound": sum(costs.get(cause, 0.0) for cause in LOADER),
        **{kind: costs[kind] for kind in BLAMED_FROM if kind in costs},
    }
    each_epoch = sum(costs.get(cause, 0.0) for cause in ("start-up", "validation", "checkpoint"))
    if _is_short(ranks, whole):
        of["short epochs"] = each_epoch
    blamed = {kind: cost for kind, cost in of.items() if cost >= BLAMED_FROM[kind]}
    if not blamed:
        return "step-bound", "step-bound", 0.0
    kind = max(blamed, key=lambda kind: blamed[kind])
    by = max(LOADER, key=lambda cause: costs.get(cause, 0.0)) if kind == "loader-bound" else kind
    return kind, by, blamed[kind]


def _is_short(ranks: Sequence[Rank], seconds: float) -> bool:
    return seconds < SHORT_SECONDS and max(rank["steps"] for rank in ranks) < SHORT_STEPS


def _busy(rank: Rank) -> float:
    """Seconds for which the others would wait, were they done: waiting for the loader, and its own part of steps."""
    return _waited(rank) + _stepping(rank) - _compiling(rank)


def _stepping(rank: Rank) -> float:
    """Seconds of its own part of steps."""
    return float(rank["step_seconds"]) - float(rank["exchange_seconds"] or 0.0)


def _waited(rank: Rank) -> float:
    """Seconds of waiting for the loader, but for the first batch."""
    return max(0.0, float(rank["loader_wait_seconds"]) - _first_batch(rank))


def _first_batch(rank: Rank) -> float:
    return float(rank["first_batch_seconds"] or 0.0)


def _saving(rank: Rank) -> float:
    return float(rank["checkpoint_seconds"])


def _compiling(rank: Rank) -> float:
    """What the first step took beyond the mean of those that followed."""
    first, rest = rank["first_step_seconds"], rank["steps"] - 1
    if first is None or rest < 1:
        return 0.0
    mean = max(0.0, _stepping(rank) - first) / rest
    return float(max(0.0, first - mean))


def _begun(rank: Rank) -> float:
    """Seconds until it had its first batch, and had compiled."""
    return _first_batch(rank) + _compiling(rank)


def _straggler(ranks: Sequence[Rank]) -> tuple[Rank | None, float, bool]:
    """The slowest rank, the seconds it takes beyond the median of the others, image for image, and whether most of them
    are waiting for its loader."""
    whole = max(rank["seconds"] for rank in ranks)
    if len(ranks) < 2 or not all(rank["images"] for rank in ranks) or _is_short(ranks, whole):
        return None, 0.0, False
    # Where no exchange could be timed, a rank is told from the others by its loader alone.
    timed = all(rank["exchange_seconds"] is not None for rank in ranks)
    pace = [(_busy(rank) if timed else _waited(rank)) / rank["images"] for rank in ranks]
    slowest = pace.index(max(pace))
    lost = (pace[slowest] - median(pace[:slowest] + pace[slowest + 1 :])) * ranks[slowest]["images"]
    others = [*ranks[:slowest], *ranks[slowest + 1 :]]
    by_loader = _waited(ranks[slowest]) - median(map(_waited, others)) > lost / 2
    if lost < BLAMED_FROM["straggler"] * whole or (by_loader and not _has_slower_loader(ranks[slowest], others, whole)):
        return None, 0.0, False
    return ranks[slowest], lost, by_loader


def _has_slower_loader(rank: Rank, others: Sequence[Rank], whole: float) -> bool:
    """Whether the others' loaders are much faster: of those a little ahead, only the last one is waited for too."""
    if median(map(_waited, others)) > 0.05 * whole:
        return False

    def computing(rank: Rank) -> float:
        return float(((rank["helpers_seconds"] or 0.0) + (rank["helpers_queued_seconds"] or 0.0)) / rank["images"])

    waits, theirs = rank["loader_waits"], median(map(computing, others))
    by_computing = sum(waits.get(cause, 0.0) for cause in ON_CORES) > sum(waits.values()) / 2
    return not (by_computing and theirs) or computing(rank) > 1.3 * theirs


def _for_want_of_cores(
    ranks: Sequence[Rank], waits: Mapping[str, float], slowed: float, taken: float
) -> dict[str, float]:
    """The waits, contentions and slower steps, in seconds.

    Args:
        slowed: seconds of steps beyond the ceiling's.
        taken: the share that other processes have of what is computed.
    """
    queued_share = _queued_share(ranks) * taken  # what its own threads take from each other is the loader's affair
    contended = sum(waits.get(cause, 0.0) for cause in ON_CORES) * queued_share
    # Steps on a CPU may be longer for other reasons than cores; what others take, they may have taken from the ceiling.
    queued = _mean(ranks, "cpu_queued_seconds")
    on_gpu = ranks[0]["device"] == "cuda"
    lacking = 0.0 if on_gpu else max(min(queued, slowed), queued * taken)
    left = {cause: wait * (1 - queued_share) if cause in ON_CORES else wait for cause, wait in waits.items()}
    # While all wait for a disk cores idle; where none did, what held reading up was, as far as threads queued, cores.
    if "storage" in left and (idle := _idle_share(ranks)) is not None and idle <= SATURATED_IDLE:
        reading = min(left["storage"], _mean(ranks, "helpers_queued_seconds"))
        left["storage"] -= reading
        contended += reading
    slower = "gpu contention" if on_gpu else "slower steps"
    return {**left, "contention": contended + lacking, slower: max(0.0, slowed - lacking)}


def _mean(ranks: Sequence[Rank], name: str) -> float:
    """Over ranks, of what may not have been measured."""
    return fmean(float(rank[name] or 0.0) for rank in ranks)


def _exchanging(ranks: Sequence[Rank]) -> float:
    """Seconds that exchanging gradients takes even when no rank is late: the shortest of all, each step."""
    shortest = [rank["shortest_exchange_seconds"] for rank in ranks]
    if any(seconds is None for seconds in shortest):
        return 0.0
    return float(min(shortest) * max(rank["steps"] for rank in ranks))


def _waits(ranks: Sequence[Rank]) -> dict[str, float]:
    """Seconds of waiting for the loader by cause, mean over ranks; shared out as the hosts were blocked."""
    mean = fmean(map(_waited, ranks))
    blocked = {cause: sum(rank["loader_waits"].get(cause, 0.0) for rank in ranks) for cause in LOADER}
    whole = sum(blocked.values())
    if not whole:
        return {"loader": mean}
    return {cause: mean * seconds / whole for cause, seconds in blocked.items() if seconds}


def _queued_share(ranks: Sequence[Rank]) -> float:
    """Of the time in which the loader's threads could have run, the share in which they waited for a core."""
    queued = sum(rank["helpers_queued_seconds"] or 0.0 for rank in ranks)
    ran = sum(rank["helpers_seconds"] or 0.0 for rank in ranks)
    return queued / (queued + ran) if queued else 0.0


def _idle_share(ranks: Sequence[Rank]) -> float | None:
    """Of the cores that the ranks may use, on the busiest host."""
    shares = [
        rank["host_idle_seconds"] / (rank["host_idle_seconds"] + rank["host_busy_seconds"])
        for rank in ranks
        if rank["host_idle_seconds"] is not None and rank["host_idle_seconds"] + rank["host_busy_seconds"]
    ]
    return min(shares, default=None)


def foreign_share(ranks: Sequence[Rank]) -> tuple[str, float]:
    """The host of which others take most, and their share of what is computed there; 0 where cores are left."""
    most = "", 0.0
    for node in {rank["node"] for rank in ranks}:
        here = [rank for rank in ranks if rank["node"] == node]
        idle = _idle_share(here)
        if idle is None or idle > SATURATED_IDLE:
            continue
        busy = max(rank["host_busy_seconds"] or 0.0 for rank in here)
        share = max(0.0, 1 - sum(rank["cpu_seconds"] or 0.0 for rank in here) / busy) if busy else 0.0
        most = max(most, (node, share), key=lambda found: found[1])
    return most
