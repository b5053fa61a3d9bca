"""The verdict: the largest cost of an epoch's time, and what to try; docs/verdict.md explains it.

CAUSES, at the end of this file, is the table of causes, with the threshold and the words of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

from raydali.errors import UsageError
from raydali.extras import has_dali
from raydali.host.hardware import COMPILE_PAYS_FROM, fastest_precision
from raydali.measure.costs import (
    LOADER,
    Rank,
    Straggler,
    contended_node,
    idle_share,
    seconds_by_cause,
    straggler_of,
    waited,
)
from raydali.text import plural

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

SHORT_STEPS, SHORT_SECONDS = 10, 10.0
"""An epoch with fewer steps and a shorter time mostly consists of costs that do not depend on its length."""
_EACH_EPOCH: tuple[Kind, ...] = "start-up", "validation", "checkpoint"
TOO_SHORT_STEPS, TOO_SHORT_SECONDS = 30, 1.0
"""If an epoch has fewer steps and a shorter time, the measurements are too few to name a cause."""
AT_CEILING = 0.95
"""From this share of the ceiling on, training counts as fast as its steps alone."""


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
    straggler = None if is_short else straggler_of(ranks, CAUSES["straggler"].blamed_from)
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
    by_kind: dict[Kind, float] = {}
    for cause, cost in costs.items():
        kind = CAUSES[cause].kind
        by_kind[kind] = by_kind.get(kind, 0.0) + cost
    return by_kind


def _largest(by_kind: Mapping[Kind, float], ranks: Sequence[Rank], whole: float) -> tuple[Kind, float]:
    """Return the kind of the verdict, and its cost as a share of the epoch."""
    each_epoch = sum(by_kind.get(kind, 0.0) for kind in _EACH_EPOCH)
    if _is_short(ranks, whole, TOO_SHORT_STEPS, TOO_SHORT_SECONDS):
        return "short epochs", each_epoch
    costs = dict(by_kind)
    if _is_short(ranks, whole):
        costs["short epochs"] = each_epoch
    blamed_from = {cause.kind: cause.blamed_from for cause in CAUSES.values()}
    blamed = {kind: cost for kind, cost in costs.items() if cost >= blamed_from[kind]}
    if not blamed:
        return "step-bound", 0.0
    kind = max(blamed, key=lambda kind: blamed[kind])
    return kind, blamed[kind]


def _is_short(ranks: Sequence[Rank], whole: float, steps: int = SHORT_STEPS, seconds: float = SHORT_SECONDS) -> bool:
    return whole < seconds and max(rank["steps"] for rank in ranks) < steps


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The findings that a verdict describes; see Verdict.

    Attributes:
        cost: share of the epoch that the cause costs.
        largest: the largest cost of training and its kind, even if it is too small for a verdict.
        seconds: duration of the epoch.
        wait: share of the training time for which a rank waited for its loader, without the first batch.
        mutual_wait: share of the training time for which a rank waited in an all-reduce for another rank's loader.
        of_ceiling: share of the ceiling; None if the ceiling is not known.
        ranks, nodes: number of ranks, number of nodes.
        contended_node, foreign_cpu_share: see `costs.contended_node`.
        idle: share of idle cores on the busiest node.
        has_bf16: whether all devices have bf16 units.
        options: the job's options, a dataclass; None for a training loop without a job.
        useful_block: returns a `shuffle_block` that suits the data; 0 if there is none.
    """

    cause: str
    cost: float
    largest: tuple[float, str] | None
    steps: int
    seconds: float
    wait: float
    mutual_wait: float
    of_ceiling: float | None
    ranks: int
    nodes: int
    straggler: Straggler | None
    contended_node: str
    foreign_cpu_share: float
    idle: float | None
    device: str
    has_bf16: bool
    options: Any
    useful_block: Callable[[], int] = lambda: 0

    def takes(self, **change: Any) -> bool:
        """Return whether the job has these options, accepts these values, and does not use them already."""
        try:
            return bool(replace(self.options, **change) != self.options)
        except (TypeError, UsageError):
            return False

    def first(self, *remedies: "Advice | str") -> str:
        """Return the first remedy that applies; empty for none."""
        return next((text for one in remedies if (text := one if isinstance(one, str) else one.to(self))), "")

    def on(self, node: str) -> str:
        """Return " on node NODE", or nothing if there is only one."""
        return f" on node {node}" if self.nodes > 1 else ""


@dataclass(frozen=True)
class Advice:
    """Advice that depends on the options of the job.

    Attributes:
        option: the advice in words.
        change: the changed options; only a job that accepts them gets the advice.
        own: the advice for a training loop without a job; empty for none.
    """

    option: str
    change: dict[str, Any] = field(default_factory=dict)
    own: str = ""

    def to(self, found: Finding) -> str:
        """Return the advice for the job of this finding; empty for none."""
        if found.options is None:
            return self.own
        return self.option if found.takes(**self.change) else ""


Sentence = tuple[str, str, str]
"""The headline, the cost, and what to try; an empty text for nothing."""


def describe(finding: Finding) -> str:
    """Return the text of the verdict."""
    headline, what, remedy = CAUSES[finding.cause].describe(finding)
    return f"{headline}: {what}. Try {remedy}" if remedy else f"{headline}: {what}"


_ANY = 1 << 20
"""A larger value than any option has."""
_MORE_CORES = Advice("a higher --cpus-per-worker", {"cpus_per_worker": _ANY}, "more cores and threads")


def _smaller(found: Finding) -> str:
    smaller: str = getattr(found.options, "smaller_data", "images stored smaller")
    return smaller


def _waited(found: Finding) -> str:
    """Return how long ranks waited for data, as in the epoch's row, and additionally for each other."""
    who = "ranks" if found.ranks > 1 else "training"
    text = f"{who} waited {found.wait:.0%} of the time for data"
    if found.mutual_wait >= 0.005:
        text += f" and {found.mutual_wait:.0%} for each other's data"
    return text


def _storage(found: Finding) -> Sentence:
    block = found.useful_block() if found.options is not None else 0
    text = f"--shuffle-block {block} if the disk is a hard disk, else a faster disk"
    blocks = [Advice(text, {"shuffle_block": block})] if block else []
    is_remote = found.nodes > 1 or "://" in str(getattr(found.options, "data", ""))
    copy = "a copy of the data on local disks" if is_remote else ""
    return "loader-bound by storage", _waited(found), found.first(copy, *blocks, "the data on a faster disk")


def _python(found: Finding) -> Sentence:
    cost = f"ranks waited {found.cost:.0%} of the epoch for Python code of the pipeline"
    return "loader-bound by Python", cost, "DALI's operators or numpy on whole batches (docs/own-data.md)"


def _cpu_decode(found: Finding) -> Sentence:
    is_slower = getattr(found.options, "loader", None) == "torch" and has_dali()
    dali = [Advice("--loader dali", {"loader": "dali"})] if is_slower else []
    if found.idle is not None and found.idle > 0.2:
        cores = f": {found.idle:.0%} of cores are idle"
        more = Advice(_MORE_CORES.option + cores, _MORE_CORES.change, _MORE_CORES.own + cores)
        remedy = found.first(*dali, more)
    else:
        remedy = found.first(*dali, _smaller(found))
    return "loader-bound by decoding on the CPU", _waited(found), remedy


def _gpu_decode(found: Finding) -> Sentence:
    return "loader-bound by decoding on the GPU", _waited(found), _smaller(found)


def _loader(found: Finding) -> Sentence:
    return "loader-bound", _waited(found), found.first(_MORE_CORES)


def _step_bound(found: Finding) -> Sentence:
    compiled = Advice("--compile", {"compile": True}, "torch.compile")
    steps = found.steps * getattr(found.options, "epochs", COMPILE_PAYS_FROM)
    half = fastest_precision(found.device, bf16=found.has_bf16)
    is_slow = getattr(found.options, "precision", "fp32") == "fp32"  # bf16 and fp16 are about equally fast
    faster = found.first(
        *([Advice(f"--precision {half}", {"precision": half}, half)] if is_slow and half != "fp32" else []),
        *([compiled] if found.device == "cuda" and steps >= COMPILE_PAYS_FROM else []),
        "more GPUs" if found.device == "cuda" else "a GPU",
    )
    if found.of_ceiling is None:
        what = "no other cost is large, and the ceiling is not known"
    elif found.of_ceiling >= AT_CEILING or found.largest is None:
        what = f"{found.of_ceiling:.0%} of the ceiling, so nothing but the step itself takes time"
    else:
        cost, kind = found.largest
        name = next(each.name for each in CAUSES.values() if each.kind == kind)
        what = f"{found.of_ceiling:.0%} of the ceiling; the largest other cost, {cost:.0%} of the epoch, is {name}"
    return "step-bound", what, faster


def _straggler(found: Finding) -> Sentence:
    assert found.straggler is not None
    late, waits = found.straggler.rank, found.straggler.waits
    what = f"the others waited for it {found.cost:.0%} of the epoch, because its steps are slow"
    if waits is not None:
        what = f"its loader made it wait for {waits[0]:.1f} s and the others for {waits[1]:.1f} s"
    where = found.on(late["node"])
    doctor = "`raydali doctor` on that node" if where else "`raydali doctor`"
    return f"straggler, rank {late['rank']}{where}", what, doctor


def _contention(found: Finding) -> Sentence:
    if found.foreign_cpu_share > 0.2:
        used = f"other processes used {found.foreign_cpu_share:.0%} of the CPU time{found.on(found.contended_node)}"
        what = f"{used}, which cost {found.cost:.0%} of the epoch"
        return "CPU contention", what, "nodes of its own" if found.nodes > 1 else "closing other programs"
    what = f"the model and the loader waited for a core {found.cost:.0%} of the epoch"
    fewer = Advice("fewer --workers", own="fewer ranks")
    on_a_node = " on each node" if found.nodes > 1 else ""
    return "CPU contention", what, found.first(fewer) + on_a_node if found.ranks > found.nodes else "more CPU cores"


def _gpu_contention(found: Finding) -> Sentence:
    what = f"steps are slower while the loader runs, which cost {found.cost:.0%} of the epoch"
    return "GPU contention", what, _smaller(found)


def _slower_steps(found: Finding) -> Sentence:
    what = f"steps took longer than at the ceiling, which cost {found.cost:.0%} of the epoch, although cores were free"
    return "slower steps", what, "torch.set_flush_denormal(True)"


def _communication(found: Finding) -> Sentence:
    what = f"all-reduces took {found.cost:.0%} of the epoch although no rank was late"
    larger = Advice("a larger --global-batch-size", {"global_batch_size": _ANY}, "larger global batches")
    return "communication", what, found.first(larger, "a faster network")


def _start_up(found: Finding) -> Sentence:
    return "start-up", f"the first batch took {found.cost:.0%} of the epoch, as it does once after each start", ""


def _compile(found: Finding) -> Sentence:
    what = f"the first step took {found.cost:.0%} of the epoch longer than the others, as it does once after each start"
    warmed_up = Advice("leaving out --no-ceiling, so that steps are warmed up", {"ceiling": True})
    return "compile", what, found.first(*([warmed_up] if found.device == "cpu" else []))  # GPUs always warm up


def _validation(found: Finding) -> Sentence:
    where = " (--val-data)" if found.takes(val_data="fewer") else ""
    return "validation", f"it took {found.cost:.0%} of the epoch", f"fewer validation samples{where}"


def _checkpoint(found: Finding) -> Sentence:
    what = f"training waited for checkpoints {found.cost:.0%} of the epoch"
    fewer = ["a higher --checkpoint-every"] if getattr(found.options, "checkpoint_every", 0) else []
    faster = Advice("a faster --storage", {"storage": "faster"}, "faster storage")
    return "checkpoints", what, found.first(*fewer, faster)


def _short_epochs(found: Finding) -> Sentence:
    epoch = f"an epoch of {plural(found.steps, 'step')} in {found.seconds:.1f} s is too short to judge"
    what = f"{epoch}; start-up, validation and checkpoint took {found.cost:.0%} of it"
    return "short epochs", what, ""


class Cause(NamedTuple):
    """A row of the table of causes.

    Attributes:
        kind: the kind of its verdict; all causes of a wait for the loader have one in common, and their costs add up.
        blamed_from: the minimum cost, as a share of the epoch, from which a verdict names it: smaller costs are normal.
        name: what it is called if it is the largest cost, but too small for a verdict.
        describe: returns the sentence of its verdict.
    """

    kind: Kind
    blamed_from: float
    name: str
    describe: Callable[[Finding], Sentence]


CAUSES: dict[str, Cause] = {
    "storage": Cause("loader-bound", 0.1, "waiting for data", _storage),
    "python": Cause("loader-bound", 0.1, "waiting for data", _python),
    "cpu decode": Cause("loader-bound", 0.1, "waiting for data", _cpu_decode),
    "gpu decode": Cause("loader-bound", 0.1, "waiting for data", _gpu_decode),
    "loader": Cause("loader-bound", 0.1, "waiting for data", _loader),
    "straggler": Cause("straggler", 0.15, "straggler", _straggler),
    "communication": Cause("communication", 0.2, "communication", _communication),
    "contention": Cause("contention", 0.15, "waiting for cores", _contention),
    "gpu contention": Cause("gpu contention", 0.15, "the loader's use of the GPU", _gpu_contention),
    "slower steps": Cause("slower steps", 0.3, "slower steps", _slower_steps),
    "start-up": Cause("start-up", 0.2, "the first batch", _start_up),
    "compile": Cause("compile", 0.2, "the first step", _compile),
    "validation": Cause("validation", 0.25, "validation", _validation),
    "checkpoint": Cause("checkpoint", 0.1, "checkpoints", _checkpoint),
    "short epochs": Cause("short epochs", 0.3, "short epochs", _short_epochs),
    "step-bound": Cause("step-bound", 0.0, "step-bound", _step_bound),  # the verdict if no cause is named
}
