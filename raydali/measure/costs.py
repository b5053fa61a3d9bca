"""Attribute the seconds of an epoch to causes, from the records of its ranks; docs/verdict.md explains the method.

An epoch takes as long as its slowest rank, plus validation. The ceiling gives the time that training itself needs: the
time of the same steps if their batch is already on the device. The remaining seconds are divided among these causes:

    start-up        the time until the first batch of the last worker
    compile         the time from there to the end of the last worker's first step, minus the mean of later steps
    straggler       how much longer one rank waited for its loader or computed than the median of the others, unless it
                    waited for a core meanwhile
    storage, python, cpu decode, gpu decode, loader
                    how long the other ranks waited for the loader, by what blocked it; `loader` if that is unknown
    python          also the time of steps beyond that at the ceiling, up to the time that the loader's Python ran
                    meanwhile: the threads of a process run Python one at a time
    communication   the time of an all-reduce if no rank is late
    contention      the wait for a core
    gpu contention  on a GPU, the time of steps beyond that at the ceiling: the loader slows them down
    slower steps    on a CPU, the time of steps beyond that at the ceiling although they had their cores
    validation      the time of the validation
    checkpoint      the time for which a checkpoint blocks the first rank, and so the others
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

ON_CORES = ("python", "cpu decode")
LOADER = ("storage", "python", "cpu decode", "gpu decode", "loader")
SATURATED_IDLE = 0.15
"""If cores are idle for a smaller share of the time, all of them count as busy."""

Rank = Mapping[str, Any]


@dataclass(frozen=True)
class Straggler:
    """The slowest rank of an epoch.

    Attributes:
        rank: the rank's record.
        seconds: how much longer it takes than the median of the others for the same number of images.
        waits: if most of this is waiting for the loader: the rank's seconds of it, and the median of the others.
        lacks_cores: whether most of this is waiting for a core, which is contention.
    """

    rank: Rank
    seconds: float
    waits: tuple[float, float] | None
    lacks_cores: bool = False


def seconds_by_cause(
    ranks: Sequence[Rank], straggler: Straggler | None, foreign_cpu_share: float, at_ceiling: float | None
) -> dict[str, float]:
    """Return the seconds of an epoch that each cause costs, without validation.

    Args:
        ranks: the ranks of the epoch.
        straggler: the slowest rank, if the others waited for it.
        foreign_cpu_share: see `contended_node`.
        at_ceiling: seconds that the same steps take at the ceiling; None if it is unknown.
    """
    lost = straggler.seconds if straggler is not None else 0.0
    others = [rank for rank in ranks if straggler is None or rank is not straggler.rank]
    exchanging = _communicating(ranks)
    begun, started = max(map(_begun, ranks)), max(map(_first_batch, ranks))
    saved = max(float(rank["checkpoint_seconds"]) for rank in ranks)
    # The other ranks spend these seconds in the all-reduce. They wait there longer if different ranks are late in
    # different steps.
    explained = fmean(begun - _begun(rank) + saved - rank["checkpoint_seconds"] for rank in others)
    waiting = max(0.0, _mean(others, "exchange_seconds") - exchanging - lost)
    if all(rank["exchange_seconds"] is not None for rank in others):
        explained = min(explained, waiting)
    late = max(0.0, waiting - explained)
    # The time of steps beyond their time at the ceiling.
    stepped = _mean(others, "step_seconds") - fmean(map(_compiling, others)) - lost - late - explained
    slowed = max(0.0, stepped - at_ceiling) if at_ceiling is not None else 0.0
    waits = _waits(others)
    in_python = waits.get("python", 0.0)
    beside = min(slowed, max(0.0, _mean(others, "python_seconds") - in_python))
    waits["python"] = in_python + beside
    slowed -= beside
    # If one rank waits, each other rank waits at most as long. All-reduces also differ for other reasons, so `late` may
    # be too large: limit it to the time beyond that at the ceiling that is not explained yet.
    own = sum(waits.values()) + slowed
    late = min(late, own * (len(others) - 1))
    if at_ceiling is not None:
        trained = max(float(rank["seconds"]) for rank in ranks)
        late = min(late, max(0.0, trained - at_ceiling - begun - saved - lost - own))
    lateness = late / own if own else 0.0
    waits = {cause: seconds * (1 + lateness) for cause, seconds in waits.items()}
    costs = {
        "start-up": started,
        "compile": begun - started,
        "communication": exchanging,
        **_contention(others, waits, slowed * (1 + lateness), foreign_cpu_share),
        "checkpoint": saved,
        "straggler": 0.0,
    }
    costs["contention" if straggler is not None and straggler.lacks_cores else "straggler"] += lost
    return costs


def straggler_of(ranks: Sequence[Rank], least_share: float) -> Straggler | None:
    """Return the slowest rank if it costs at least this share of the epoch; otherwise None."""
    whole = max(rank["seconds"] for rank in ranks)
    if len(ranks) < 2 or not all(rank["images"] for rank in ranks):
        return None
    # If all-reduces were not timed, steps of all ranks take equally long, and only waits for the loader differ.
    busy = _busy if all(rank["exchange_seconds"] is not None for rank in ranks) else waited
    slowest = max(ranks, key=lambda rank: busy(rank) / rank["images"])
    others = [rank for rank in ranks if rank is not slowest]

    def more(seconds: Callable[[Rank], float]) -> float:
        usual: float = median(seconds(rank) / rank["images"] for rank in others)
        return seconds(slowest) - usual * float(slowest["images"])

    lost = more(busy)
    waits = waited(slowest), median(map(waited, others))
    by_loader = waits[0] - waits[1] > lost / 2
    if lost < least_share * whole or (by_loader and not _has_slower_loader(slowest, others, whole)):
        return None
    # Steps of a GPU do not wait for the host's cores.
    queued = "helpers_queued_seconds" if by_loader else "cpu_queued_seconds"
    lacks_cores = more(lambda rank: rank[queued] or 0.0) > lost / 2 and (by_loader or slowest["device"] == "cpu")
    return Straggler(slowest, lost, waits if by_loader else None, lacks_cores)


def _has_slower_loader(rank: Rank, others: Sequence[Rank], whole: float) -> bool:
    """Return whether the others' loaders are much faster: even among equal loaders one is the slowest."""
    if median(map(waited, others)) > 0.05 * whole:
        return False

    def computing(rank: Rank) -> float:
        return float(((rank["helpers_seconds"] or 0.0) + (rank["helpers_queued_seconds"] or 0.0)) / rank["images"])

    waits, theirs = rank["loader_waits"], median(map(computing, others))
    by_computing = sum(waits.get(cause, 0.0) for cause in ON_CORES) > sum(waits.values()) / 2
    return not (by_computing and theirs) or computing(rank) > 1.3 * theirs


def _contention(
    ranks: Sequence[Rank], waits: Mapping[str, float], slowed: float, foreign_cpu_share: float
) -> dict[str, float]:
    """Return the seconds of waits, contention and slower steps.

    Args:
        ranks: the ranks of the epoch without the straggler.
        waits: seconds of waiting for the loader, by cause.
        slowed: seconds of steps beyond their time at the ceiling.
        foreign_cpu_share: see `contended_node`.
    """
    # It is no contention if the loader's threads wait for each other.
    queued_share = _queued_share(ranks) * foreign_cpu_share
    contended = sum(waits.get(cause, 0.0) for cause in ON_CORES) * queued_share
    # Steps on a CPU may also take longer for other reasons. Other processes may also have lowered the ceiling.
    queued = _mean(ranks, "cpu_queued_seconds")
    on_gpu = ranks[0]["device"] == "cuda"
    lacking = 0.0 if on_gpu else max(min(queued, slowed), queued * foreign_cpu_share)
    rest = {cause: wait * (1 - queued_share) if cause in ON_CORES else wait for cause, wait in waits.items()}
    # If all threads wait for a disk, cores are idle. If none was idle, reading waited for cores while threads queued.
    if "storage" in rest and (idle := idle_share(ranks)) is not None and idle <= SATURATED_IDLE:
        reading = min(rest["storage"], _mean(ranks, "helpers_queued_seconds"))
        rest["storage"] -= reading
        contended += reading
    slower = "gpu contention" if on_gpu else "slower steps"
    return {**rest, "contention": contended + lacking, slower: max(0.0, slowed - lacking)}


def _busy(rank: Rank) -> float:
    """Return the seconds for which other ranks may have to wait for this one: its loader, and its own part of steps."""
    return waited(rank) + _stepping(rank) - _compiling(rank)


def _stepping(rank: Rank) -> float:
    """Return the seconds of steps without the wait for other ranks."""
    return float(rank["step_seconds"]) - float(rank["exchange_seconds"] or 0.0)


def waited(rank: Rank) -> float:
    """Return the seconds of waiting for the loader, without the first batch."""
    return max(0.0, float(rank["loader_wait_seconds"]) - _first_batch(rank))


def _first_batch(rank: Rank) -> float:
    return float(rank["first_batch_seconds"] or 0.0)


def _compiling(rank: Rank) -> float:
    """Return the seconds of the first step beyond the mean of later steps."""
    first, rest = rank["first_step_seconds"], rank["steps"] - 1
    if first is None or rest < 1:
        return 0.0
    mean = max(0.0, _stepping(rank) - first) / rest
    return float(max(0.0, first - mean))


def _begun(rank: Rank) -> float:
    """Return the seconds of the rank's first batch and compilation."""
    return _first_batch(rank) + _compiling(rank)


def _mean(ranks: Sequence[Rank], name: str) -> float:
    """Return the mean over ranks; a missing value counts as 0."""
    return fmean(float(rank[name] or 0.0) for rank in ranks)


def _communicating(ranks: Sequence[Rank]) -> float:
    """Return the seconds of all-reduces if no rank is late: the shortest all-reduce, times the number of steps."""
    shortest = [rank["shortest_exchange_seconds"] for rank in ranks]
    if any(seconds is None for seconds in shortest):
        return 0.0
    return float(min(shortest) * max(rank["steps"] for rank in ranks))


def _waits(ranks: Sequence[Rank]) -> dict[str, float]:
    """Return the mean seconds of waiting for the loader by cause, in proportion to what blocked the hosts."""
    mean = fmean(map(waited, ranks))
    blocked = {cause: sum(rank["loader_waits"].get(cause, 0.0) for rank in ranks) for cause in LOADER}
    whole = sum(blocked.values())
    if not whole:
        return {"loader": mean}
    return {cause: mean * seconds / whole for cause, seconds in blocked.items() if seconds}


def _queued_share(ranks: Sequence[Rank]) -> float:
    """Return how long the loader's threads waited for a core, as a share of the time in which they could run."""
    queued = sum(rank["helpers_queued_seconds"] or 0.0 for rank in ranks)
    ran = sum(rank["helpers_seconds"] or 0.0 for rank in ranks)
    return queued / (queued + ran) if queued else 0.0


def idle_share(ranks: Sequence[Rank]) -> float | None:
    """Return the idle share of the cores that ranks may use, on the busiest node; None if it was not measured."""
    shares = [
        rank["host_idle_seconds"] / (rank["host_idle_seconds"] + rank["host_busy_seconds"])
        for rank in ranks
        if rank["host_idle_seconds"] is not None and rank["host_idle_seconds"] + rank["host_busy_seconds"]
    ]
    return min(shares, default=None)


def contended_node(ranks: Sequence[Rank]) -> tuple[str, float]:
    """Return the node on which other processes use the largest share of the CPU time, and this share.

    The share is 0 if cores are idle.
    """
    most = "", 0.0
    for node in {rank["node"] for rank in ranks}:
        here = [rank for rank in ranks if rank["node"] == node]
        idle = idle_share(here)
        if idle is None or idle > SATURATED_IDLE:
            continue
        busy = max(rank["host_busy_seconds"] or 0.0 for rank in here)
        share = max(0.0, 1 - sum(rank["cpu_seconds"] or 0.0 for rank in here) / busy) if busy else 0.0
        most = max(most, (node, share), key=lambda node_share: node_share[1])
    return most
