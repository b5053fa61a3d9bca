"""The verdict: the largest cost of an epoch's time, and what to try; docs/verdict.md explains it.

CAUSES, near the end of this file, is the table of causes, with the threshold and the words of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

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

SHORT_STEPS, SHORT_SECONDS = 10, 10.0
"""An epoch with fewer steps and a shorter time mostly consists of costs that do not depend on its length."""
_EACH_EPOCH = "start-up", "validation", "checkpoint"
TOO_SHORT_STEPS, TOO_SHORT_SECONDS = 30, 1.0
"""If an epoch has fewer steps and a shorter time, the measurements are too few to name a cause."""
AT_CEILING = 0.95
"""From this share of the ceiling on, training counts as fast as its steps alone."""
_ANY = 1 << 20
"""A larger value than any option has."""
_FOREIGN = 0.2
"""From this share of the CPU time on, other processes are the cause of contention."""


class Verdict(NamedTuple):
    """The largest cost of an epoch's time, and what to try.

    Attributes:
        kind: the largest cost, or "step-bound" if none is large.
        cause: one of LOADER if the kind is "loader-bound", otherwise the kind.
        costs: cost of each cause as a share of the epoch, validation included, without zeros.
        text: a sentence, with the kind before the first colon, and a remedy if there is one.
    """

    kind: str
    cause: str
    costs: dict[str, float]
    text: str


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
    whole, steps = trained + validation, max(rank["steps"] for rank in ranks)
    if not images or not trained:
        return None

    straggler = None
    if trained >= SHORT_SECONDS or steps >= SHORT_STEPS:
        straggler = straggler_of(ranks, CAUSES["straggler"].blamed_from)
    node, foreign_cpu_share = contended_node(ranks)
    ceiling = record["ceiling_images_per_second"]
    at_ceiling = images / ceiling if ceiling else None
    seconds = {**seconds_by_cause(ranks, straggler, foreign_cpu_share, at_ceiling), "validation": validation}
    costs = {cause: round(min(1.0, cost / whole), 4) for cause, cost in seconds.items() if cost / whole >= 0.00005}
    by_kind: dict[str, float] = {}
    for cause, cost in costs.items():
        by_kind[kind_of(cause)] = by_kind.get(kind_of(cause), 0.0) + cost
    busy = record["gpu_busy"]
    if at_ceiling is not None and busy is not None:
        by_kind["launch-bound"] = (1 - busy) * at_ceiling / whole
    kind, cost = _largest(by_kind, steps, whole)
    cause = max(LOADER, key=lambda cause: costs.get(cause, 0.0)) if kind == "loader-bound" else kind
    wait = fmean(map(waited, ranks))
    finding = Finding(
        cause=cause,
        cost=cost,
        largest=max(((cost, kind) for kind, cost in by_kind.items() if kind != "validation"), default=None),
        steps=steps,
        seconds=whole,
        wait=wait / trained,
        mutual_wait=max(0.0, sum(seconds.get(cause, 0.0) for cause in LOADER) - wait) / trained,
        of_ceiling=record["of_ceiling"],
        gpu_busy=busy,
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
        repeated=sum(rank.get("storage", {}).get("repeated", 0) for rank in ranks),
    )
    return Verdict(kind, cause, costs, describe(finding))


def _largest(by_kind: Mapping[str, float], steps: int, seconds: float) -> tuple[str, float]:
    """Return the kind of the verdict on an epoch of so many steps and seconds, and its cost as a share of the epoch."""
    each_epoch = sum(by_kind.get(kind, 0.0) for kind in _EACH_EPOCH)
    if seconds < TOO_SHORT_SECONDS and steps < TOO_SHORT_STEPS:
        return "short epochs", each_epoch
    costs = dict(by_kind)
    if seconds < SHORT_SECONDS and steps < SHORT_STEPS:
        costs["short epochs"] = each_epoch
    blamed_from = {kind_of(name): cause.blamed_from for name, cause in CAUSES.items()}
    blamed = {kind: cost for kind, cost in costs.items() if cost >= blamed_from[kind]}
    return max(blamed.items(), key=lambda kind_and_cost: kind_and_cost[1], default=("step-bound", 0.0))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The findings that a verdict describes.

    Attributes:
        cause: see Verdict.
        cost: share of the epoch that the cause costs.
        largest: the largest cost of training and its kind, even if it is too small for a verdict.
        seconds: duration of the epoch.
        wait: share of the training time for which a rank waited for its loader, without the first batch.
        mutual_wait: share of the training time for which a rank waited in an all-reduce for another rank's loader.
        of_ceiling: share of the ceiling; None if the ceiling is not known.
        gpu_busy: see `epoch_record`.
        ranks, nodes: number of ranks, number of nodes.
        contended_node, foreign_cpu_share: see `costs.contended_node`.
        idle: share of idle cores on the busiest node.
        has_bf16: whether all devices have bf16 units.
        options, useful_block: see `verdict`.
        repeated: requests that a bucket refused or broke.
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
    repeated: int = 0
    gpu_busy: float | None = None

    def option(self, name: str, default: Any) -> Any:  # noqa: ANN401 (an option of any type)
        """Return an option of the job; the default for a job without it, and for a training loop without a job."""
        return getattr(self.options, name, default)

    def advise(self, option: str, own: str = "", **change: Any) -> str:
        """Return advice to change options, if the job has them, accepts these values and does not use them already.

        Args:
            option: the advice in words.
            own: the advice for a training loop without a job.
            change: the changed options.
        """
        if self.options is None:
            return own
        try:
            return option if replace(self.options, **change) != self.options else ""
        except (TypeError, UsageError):
            return ""

    def on(self, node: str) -> str:
        """Return " on node NODE", or nothing if there is only one."""
        return f" on node {node}" if self.nodes > 1 else ""


def _first(*remedies: str) -> str:
    """Return the first remedy that is not empty."""
    return next(filter(None, remedies), "")


def _smaller(finding: Finding) -> str:
    return str(finding.option("smaller_data", "images stored smaller"))


def _waited(finding: Finding) -> str:
    """Return how long ranks waited for data, as in the epoch's row, and additionally for each other."""
    who = "ranks" if finding.ranks > 1 else "training"
    text = f"{who} waited {finding.wait:.0%} of the time for data"
    if finding.mutual_wait >= 0.005:
        text += f" and {finding.mutual_wait:.0%} for each other's data"
    if finding.repeated and finding.cause == "storage":
        text += f"; the bucket refused or broke {plural(finding.repeated, 'request')}"
    return text


def _faster_reads(finding: Finding) -> str:
    in_bucket = "://" in str(finding.option("data", ""))
    if in_bucket and finding.options is not None and finding.option("cache", "") is None:
        return "--cache DIR on a local disk, which reads from the bucket once"
    if finding.nodes > 1 or in_bucket:
        return "a copy of the data on local disks"
    block = finding.useful_block() if finding.options is not None else 0
    in_blocks = f"--shuffle-block {block} if the disk is a hard disk, else a faster disk"
    return _first(finding.advise(in_blocks, shuffle_block=block) if block else "", "the data on a faster disk")


def _more_cores(finding: Finding, note: str = "") -> str:
    return finding.advise(f"a higher --cpus-per-worker{note}", f"more cores and threads{note}", cpus_per_worker=_ANY)


def _faster_decoding(finding: Finding) -> str:
    is_slower = finding.option("loader", None) == "torch" and has_dali()
    dali = finding.advise("--loader dali", loader="dali") if is_slower else ""
    if finding.idle is not None and finding.idle > 0.2:
        return _first(dali, _more_cores(finding, f": {finding.idle:.0%} of cores are idle"))
    return _first(dali, _smaller(finding))


def _of_ceiling(finding: Finding) -> str:
    if finding.of_ceiling is None:
        return "no other cost is large, and the ceiling is not known"
    if finding.of_ceiling >= AT_CEILING or finding.largest is None:
        return f"{finding.of_ceiling:.0%} of the ceiling, so nothing but the step itself takes time"
    cost, kind = finding.largest
    name = next(row.name or cause for cause, row in CAUSES.items() if kind_of(cause) == kind)
    return f"{finding.of_ceiling:.0%} of the ceiling; the largest other cost, {cost:.0%} of the epoch, is {name}"


def _faster_steps(finding: Finding) -> str:
    on_gpu = finding.device == "cuda"
    half = fastest_precision(finding.device, bf16=finding.has_bf16)
    is_slow = finding.option("precision", "fp32") == "fp32"  # bf16 and fp16 are about equally fast
    pays = on_gpu and finding.steps * finding.option("epochs", COMPILE_PAYS_FROM) >= COMPILE_PAYS_FROM
    return _first(
        finding.advise(f"--precision {half}", half, precision=half) if is_slow and half != "fp32" else "",
        finding.advise("--compile", "torch.compile", compile=True) if pays else "",
        "more GPUs" if on_gpu else "a GPU",
    )


def _fewer_launches(finding: Finding) -> str:
    return _first(
        finding.advise("--cuda-graph", "a CUDA graph", cuda_graph=True),
        finding.advise("--compile", "torch.compile", compile=True),
        finding.advise("a larger --batch-size", "a larger batch", batch_size=_ANY),
    )


def _straggler(finding: Finding) -> str:
    assert finding.straggler is not None
    return f"straggler, rank {finding.straggler.rank['rank']}{finding.on(finding.straggler.rank['node'])}"


def _doctor(finding: Finding) -> str:
    return f"`raydali doctor`{' on that node' if finding.nodes > 1 else ''}"


def _straggling(finding: Finding) -> str:
    assert finding.straggler is not None
    if (waits := finding.straggler.waits) is not None:
        return f"its loader made it wait for {waits[0]:.1f} s and the others for {waits[1]:.1f} s"
    return f"the others waited for it {finding.cost:.0%} of the epoch, because its steps are slow"


def _exchanged(finding: Finding) -> str:
    what = "all-reduces" if finding.option("shard", None) is None else "gathering weights and summing gradients"
    return f"{what} took {finding.cost:.0%} of the epoch although no rank was late"


def _fewer_exchanges(finding: Finding) -> str:
    larger = finding.advise("a larger --global-batch-size", "larger global batches", global_batch_size=_ANY)
    return _first(larger, "a faster network")


def _contended(finding: Finding) -> str:
    if finding.foreign_cpu_share <= _FOREIGN:
        return f"the model and the loader waited for a core {finding.cost:.0%} of the epoch"
    used = f"other processes used {finding.foreign_cpu_share:.0%} of the CPU time{finding.on(finding.contended_node)}"
    return f"{used}, which cost {finding.cost:.0%} of the epoch"


def _fewer_processes(finding: Finding) -> str:
    if finding.foreign_cpu_share > _FOREIGN:
        return "nodes of its own" if finding.nodes > 1 else "closing other programs"
    if finding.ranks <= finding.nodes:
        return "more CPU cores"
    fewer = "fewer ranks" if finding.options is None else "fewer --workers"
    return f"{fewer} on each node" if finding.nodes > 1 else fewer


def _fewer_checkpoints(finding: Finding) -> str:
    if finding.option("checkpoint_every", 0):
        return "a higher --checkpoint-every"
    return finding.advise("a faster --storage", "faster storage", storage="faster")


def _fewer_samples(finding: Finding) -> str:
    every = finding.option("validate_every", 0) + 1
    rarer = finding.advise(f"--validate-every {every}, or ", validate_every=every)
    return f"{rarer}fewer validation samples" + finding.advise(" (--val-data)", val_data="fewer")


def _too_short(finding: Finding) -> str:
    epoch = f"an epoch of {plural(finding.steps, 'step')} in {finding.seconds:.1f} s is too short to judge"
    return f"{epoch}; start-up, validation and checkpoint took {finding.cost:.0%} of it"


def _warmed_up(finding: Finding) -> str:
    """Advise to warm up steps on a CPU; a GPU always does."""
    if finding.device != "cpu":
        return ""
    return finding.advise("leaving out --no-ceiling, so that steps are warmed up", ceiling=True)


Text = str | Callable[[Finding], str]
"""A format of a Finding's attributes, or a function of the finding."""


class Cause(NamedTuple):
    """A row of the table of causes.

    Attributes:
        blamed_from: the minimum cost, as a share of the epoch, from which a verdict names it: smaller costs are normal.
        what: what it costs.
        remedy: what to try; an empty text for nothing.
        headline: the beginning of its verdict. Default: its kind.
        name: what it is called if it is the largest cost, but too small for a verdict. Default: its kind.
    """

    blamed_from: float
    what: Text
    remedy: Text = ""
    headline: Text = ""
    name: str = ""


_DATA = "waiting for data"

CAUSES: dict[str, Cause] = {
    "storage": Cause(0.1, _waited, _faster_reads, "loader-bound by storage", _DATA),
    "python": Cause(
        0.1,
        "ranks waited {cost:.0%} of the epoch for Python code of the pipeline",
        "DALI's operators or numpy on whole batches (docs/own-data.md)",
        "loader-bound by Python",
        _DATA,
    ),
    "cpu decode": Cause(0.1, _waited, _faster_decoding, "loader-bound by decoding on the CPU", _DATA),
    "gpu decode": Cause(0.1, _waited, _smaller, "loader-bound by decoding on the GPU", _DATA),
    "loader": Cause(0.1, _waited, _more_cores, "loader-bound", _DATA),
    "straggler": Cause(0.15, _straggling, _doctor, _straggler),
    "communication": Cause(0.2, _exchanged, _fewer_exchanges),
    "contention": Cause(0.15, _contended, _fewer_processes, "CPU contention", "waiting for cores"),
    "gpu contention": Cause(
        0.15,
        "steps are slower while the loader runs, which cost {cost:.0%} of the epoch",
        _smaller,
        "GPU contention",
        "the loader's use of the GPU",
    ),
    "slower steps": Cause(
        0.3,
        "steps took longer than at the ceiling, which cost {cost:.0%} of the epoch, although cores were free",
        "torch.set_flush_denormal(True)",
    ),
    "start-up": Cause(
        0.2, "the first batch took {cost:.0%} of the epoch, as it does once after each start", name="the first batch"
    ),
    "compile": Cause(
        0.2,
        "the first step took {cost:.0%} of the epoch longer than the others, as it does once after each start",
        _warmed_up,
        name="the first step",
    ),
    "validation": Cause(0.25, "it took {cost:.0%} of the epoch", _fewer_samples),
    "checkpoint": Cause(
        0.1,
        "training waited for checkpoints {cost:.0%} of the epoch",
        _fewer_checkpoints,
        "checkpoints",
        "checkpoints",
    ),
    "short epochs": Cause(0.3, _too_short),
    # Its time is a part of the step at the ceiling, so `Verdict.costs` leaves it out.
    "launch-bound": Cause(
        0.2,
        "the GPU computes for {gpu_busy:.0%} of a step, and otherwise waits for the host to launch kernels",
        _fewer_launches,
        name="launching kernels",
    ),
    # The verdict if no cause is named.
    "step-bound": Cause(0.0, _of_ceiling, _faster_steps),
}


def kind_of(cause: str) -> str:
    """Return the kind of a cause's verdict: all causes of a wait for the loader have one in common."""
    return "loader-bound" if cause in LOADER else cause


def describe(finding: Finding) -> str:
    """Return the text of the verdict."""
    cause = CAUSES[finding.cause]
    headline, what, remedy = (
        part.format(**vars(finding)) if isinstance(part, str) else part(finding)
        for part in (cause.headline or finding.cause, cause.what, cause.remedy)
    )
    return f"{headline}: {what}. Try {remedy}" if remedy else f"{headline}: {what}"
