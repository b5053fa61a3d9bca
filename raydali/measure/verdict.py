"""The verdict: the largest cost of an epoch's time, and what to try; docs/verdict.md explains it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from raydali.measure.costs import LOADER, Rank, contended_node, idle_share, seconds_by_cause, straggler_of, waited
from raydali.measure.verdict_text import Finding, describe

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
"""The minimum cost, as a share of the epoch, for which a verdict names a cause: smaller costs are normal."""
SHORT_STEPS, SHORT_SECONDS = 10, 10.0
"""An epoch with fewer steps and a shorter time mostly consists of costs that do not depend on its length."""
_EACH_EPOCH: tuple[Kind, ...] = "start-up", "validation", "checkpoint"
TOO_SHORT_STEPS, TOO_SHORT_SECONDS = 30, 1.0
"""If an epoch has fewer steps and a shorter time, the measurements are too few to name a cause."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The largest cost of an epoch's time, and what to try.

    Attributes:
        kind: the largest cost, or "step-bound" if none is large.
        cause: one of LOADER if the kind is "loader-bound", otherwise the kind.
        costs: cost of each cause as a share of the epoch, validation included, without zeros.
        text: a sentence, with the kind before the first colon, and a remedy if there is one.
    """

    kind: Kind
    cause: str
    costs: dict[str, float]
    text: str

    def __str__(self) -> str:
        return self.text


def verdict(
    record: Mapping[str, Any], options: object = None, useful_block: Callable[[], int] = lambda: 0
) -> Verdict | None:
    """Return the verdict on an epoch, or None if nothing was trained.

    Args:
        record: the record of the epoch. If several worker groups ran it, only the last one counts.
        options: the job's options, a dataclass, by which remedies are chosen; None for a training loop without a job.
        useful_block: returns a `shuffle_block` that suits the data; 0 if there is none.
    """
    ranks: Sequence[Rank] = record["ranks"][-record["world_size"] :]
    images = sum(rank["images"] for rank in ranks)
    validation = (record["validation"] or {}).get("seconds") or 0.0
    trained = max(rank["seconds"] for rank in ranks)
    whole = trained + validation
    if not images or not trained:
        return None

    is_short = _is_short(ranks, whole=trained)
    straggler = None if is_short else straggler_of(ranks, BLAMED_FROM["straggler"])
    node, foreign_cpu_share = contended_node(ranks)
    ceiling = record["ceiling_images_per_second"]
    at_ceiling = images / ceiling if ceiling else None
    seconds = {**seconds_by_cause(ranks, straggler, foreign_cpu_share, at_ceiling), "validation": validation}
    costs = {cause: round(min(1.0, cost / whole), 4) for cause, cost in seconds.items() if cost / whole >= 0.00005}
    by_kind = _by_kind(costs)
    kind, cost = _largest(by_kind, ranks, whole)
    cause = max(LOADER, key=lambda cause: costs.get(cause, 0.0)) if kind == "loader-bound" else kind
    wait = fmean(map(waited, ranks))
    finding = Finding(
        cause=cause,
        cost=cost,
        largest=max(((cost, kind) for kind, cost in by_kind.items() if kind != "validation"), default=None),
        steps=max(rank["steps"] for rank in ranks),
        seconds=whole,
        wait=wait / trained,
        mutual_wait=max(0.0, sum(seconds.get(cause, 0.0) for cause in LOADER) - wait) / trained,
        of_ceiling=record["of_ceiling"],
        ranks=len(ranks),
        nodes=len({rank["node"] for rank in ranks}),
        straggler=straggler,
        contended_node=node,
        foreign_cpu_share=foreign_cpu_share,
        idle=idle_share(ranks),
        device=ranks[0]["device"],
        has_bf16=all(rank.get("has_bf16", False) for rank in ranks),
        options=options,
        useful_block=useful_block,
    )
    return Verdict(kind=kind, cause=cause, costs=costs, text=describe(finding))


def _by_kind(costs: Mapping[str, float]) -> dict[Kind, float]:
    """Return the costs by the kind of verdict that describes them."""
    of: dict[Kind, float] = {kind: costs[kind] for kind in BLAMED_FROM if kind in costs}
    by_loader = sum(costs.get(cause, 0.0) for cause in LOADER)
    return of | {"loader-bound": by_loader} if by_loader else of


def _largest(by_kind: Mapping[Kind, float], ranks: Sequence[Rank], whole: float) -> tuple[Kind, float]:
    """Return the kind of the verdict, and its cost as a share of the epoch."""
    each_epoch = sum(by_kind.get(kind, 0.0) for kind in _EACH_EPOCH)
    if _is_short(ranks, whole, TOO_SHORT_STEPS, TOO_SHORT_SECONDS):
        return "short epochs", each_epoch
    of: dict[Kind, float] = {**by_kind, **({"short epochs": each_epoch} if _is_short(ranks, whole) else {})}
    blamed = {kind: cost for kind, cost in of.items() if cost >= BLAMED_FROM[kind]}
    kind = max(blamed, key=lambda kind: blamed[kind], default=None)
    return (kind, blamed[kind]) if kind is not None else ("step-bound", 0.0)


def _is_short(ranks: Sequence[Rank], whole: float, steps: int = SHORT_STEPS, seconds: float = SHORT_SECONDS) -> bool:
    return whole < seconds and max(rank["steps"] for rank in ranks) < steps
